"""What a check of `doctor` finds."""

from typing import Literal

Status = Literal["ok", "warn", "fail"]
Finding = tuple[Status, str, str]  # status, detail, what to do
