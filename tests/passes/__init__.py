"""Tests of passes; a package, because other tests have files of the same names."""
