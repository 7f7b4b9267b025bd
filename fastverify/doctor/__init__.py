"""Checks of a machine and of recorded evidence; each is a pure function to findings."""
