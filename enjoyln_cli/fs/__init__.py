"""Atomic writing of files and directories, and digests."""
