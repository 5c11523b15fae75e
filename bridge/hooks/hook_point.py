"""`HookPoint`, which is in `hooks.py`, under the path that older programs import."""

from bridge.hooks.hooks import HookPoint as HookPoint
