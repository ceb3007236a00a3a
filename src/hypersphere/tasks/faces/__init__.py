"""Faces: data sets and lists of pairs, alignment, networks, LFW while a network is trained, and pages of verifications.

What verification and identification measure is in :mod:`hypersphere.metrics`.
"""
