"""`HookPoint`, where the documentation has shown it."""

from bridge.hooks.hooks import HookPoint as HookPoint
