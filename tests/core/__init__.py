"""Tests of understudy.core."""
