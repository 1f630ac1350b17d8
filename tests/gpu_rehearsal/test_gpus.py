"""Older GPUs and versions of torch, odd heads, and how a process takes its GPU."""
