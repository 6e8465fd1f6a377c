"""How a command answers: texts on two consoles, JSON, one line for an error, and the exit code."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

DONE, FAILED, REFUSED = 0, 1, 2

out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class Refused(Exception):
    """The request was wrong; the cause says why."""


@contextmanager
def request() -> Iterator[None]:
    """What goes wrong inside is the request's fault (exit code 2), not the run's."""
    from .train.checkpoint import CheckpointError

    try:
        yield
    except (ValueError, OSError, CheckpointError) as error:
        raise Refused from error
    except ImportError as error:  # an optional package; a fault in our own modules is not
        if (error.name or "").startswith("ottava"):
            raise
        raise Refused from error


def say(error: BaseException | None, code: int, debug: bool) -> int:
    """One line on stderr; the exit code."""
    if debug and error is not None:
        traceback.print_exception(error, file=sys.stderr)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    text = " ".join(message.split()) or type(error).__name__
    if code == FAILED and not isinstance(error, RuntimeError | OSError):
        text = f"{type(error).__name__}: {text}"
    # every rank refuses the same request: one of them says it
    if code != REFUSED or os.environ.get("RANK", "0") == "0":
        print(f"ottava: {text}", file=sys.stderr)
    return code


def print_json(value: Any) -> None:
    """Strict JSON on stdout: a number that is not finite becomes null."""

    def plain(x: Any) -> Any:
        if isinstance(x, float):
            return x if math.isfinite(x) else None
        if isinstance(x, dict):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [plain(v) for v in x]
        return x if x is None or isinstance(x, bool | int | str) else str(x)

    print(json.dumps(plain(value), allow_nan=False))
