"""How heterogeneous a federation is, and what that speaks for; `cs.diagnose(federation)`."""

from consilience.callable_package import make_callable

make_callable(__name__)
