"""Several methods on the same federation, over several seeds, tested against each other; `cs.compare([...])`."""

from consilience.callable_package import make_callable

make_callable(__name__)
