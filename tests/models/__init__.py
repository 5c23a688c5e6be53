"""Tests of understudy.models."""
