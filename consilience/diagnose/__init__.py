"""Measures how heterogeneous a federation is, and suggests methods; `cs.diagnose(federation)`."""

from consilience.callable_package import make_callable

make_callable(__name__)
