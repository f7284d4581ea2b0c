"""Types of the findings of `doctor`."""

from typing import Literal

Status = Literal["ok", "warn", "fail"]
Finding = tuple[Status, str, str]  # status, detail, advice
