"""Backends compared: what two of them compute of the same recipe, stage by stage, and why they part."""
