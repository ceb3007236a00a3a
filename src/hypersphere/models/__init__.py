"""Backbones by name: modules that map images ``(B, C, H, W)`` to features ``(B, dim)``."""

from hypersphere.models import published  # noqa: F401 - registers the published networks
from hypersphere.models.networks import CifarResNet, DigitsCNN, PlainCNN, ResNet, create, models

__all__ = ["CifarResNet", "DigitsCNN", "PlainCNN", "ResNet", "create", "models"]
