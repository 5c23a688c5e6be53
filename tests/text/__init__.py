"""Tests of understudy.text."""
