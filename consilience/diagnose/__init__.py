"""How heterogeneous a federation is, and which methods that suggests; `cs.diagnose(federation)`."""

from consilience.callable_package import make_callable

make_callable(__name__)
