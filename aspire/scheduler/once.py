"""A property that is worked out once: `functools.cached_property` without the lock that Python 3.11 and before take.

Steps are planned by one thread, and a step asks for a dozen such facts in a quarter of a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """``@once def name(self)``: the value is kept in the instance, which from then on answers by itself."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work = work
        self.__doc__ = work.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> T | once[T]:
        if instance is None:
            return self
        value = self._work(instance)
        instance.__dict__[self._name] = value
        return value
