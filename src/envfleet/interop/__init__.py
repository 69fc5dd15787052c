"""The batch in the terms of other ecosystems: one module each, imported by who uses it.

A face translates and steps nothing itself: under each is an `envfleet.ParallelPyEnvironment`.
"""
