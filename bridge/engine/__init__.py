"""Hook points inside vLLM: concurrent requests, each with its own interventions and captures."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.engine.engine import Engine as Engine
    from bridge.engine.engine import EngineAnswer as EngineAnswer
    from bridge.engine.engine import FromAnswers as FromAnswers
    from bridge.engine.readings import LensTop as LensTop
    from bridge.engine.readings import LikelyTokens as LikelyTokens
    from bridge.engine.serving import AsyncEngine as AsyncEngine
    from bridge.engine.serving import serve as serve

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineAnswer",
    "FromAnswers",
    "LensTop",
    "LikelyTokens",
    "serve",
]
__getattr__, __dir__ = lazily(
    __name__,
    AsyncEngine="serving",
    Engine="engine",
    EngineAnswer="engine",
    FromAnswers="engine",
    LensTop="readings",
    LikelyTokens="readings",
    serve="serving",
)
