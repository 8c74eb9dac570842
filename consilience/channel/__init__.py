"""What happens to a reply in transit."""

from consilience.core.algorithm import Plain

__all__ = ["Plain"]
