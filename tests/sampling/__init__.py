"""Tests of understudy.sampling."""
