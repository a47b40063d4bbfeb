"""What stands between errors of this code and vLLM's scheduler: an engine that serves without its cache is worth more
than one that is gone.

Not everything can be guarded: where vLLM has been promised bytes, there is nothing else to answer.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Method = Callable[Concatenate[Any, P], R]


def guarded(otherwise: Callable[[Any], Any]) -> Callable[[Method[P, R]], Method[P, R]]:
    """A method that answers `otherwise(owner)` once its owner `is_off`, and has it `switch_off` where it raises."""

    def guard(method: Method[P, R]) -> Method[P, R]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not self.is_off:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.switch_off()
            answer: R = otherwise(self)
            return answer

        return call

    return guard


def nothing(_: object) -> None:
    """For methods that need not answer."""
