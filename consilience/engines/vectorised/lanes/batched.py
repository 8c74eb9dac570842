"""All clients of a group in one vmapped step."""

from __future__ import annotations

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree
from consilience.engines.vectorised.program import BoundSteps, Context, Program


class Batched:
    """Clients come longest first, so that the finished ones are cut off at the end."""

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps, all clients together."""
        active = len(plan.steps)
        steps = BoundSteps(program.group, carry, context)
        for step in range(int(plan.steps.max(initial=0))):
            going = plan.active(step)
            if going < active:  # the others' rows are unchanged
                steps = BoundSteps(program.group, tree.rows(carry, slice(0, going)), context.head(going))
                active = going
            steps(plan.group(step, active, store, program.dtype))
        return carry
