"""No template is offered a problem that has no rows, images or terms, of whatever op of ours."""

import pytest
from msgspec.structs import replace

from ipex_inductor.autotune.database import Records
from ipex_inductor.lowerings.problem.workload import operands_by_name
from ipex_inductor.lowerings.select import library
from support.autotune.shipped_tables import H200, TABLES
from support.cases.weight_only_cases import weight_only_problem

pytestmark = pytest.mark.unit

H200_TABLE = next(table for table in TABLES if "sm_90" in table.name)
OF = {}  # a problem of each op, where a template may be taken
for _record in Records(H200_TABLE):
    OF.setdefault(_record.problem.op, _record.problem)
WEIGHT_ONLY = "ipex.weight_only_linear.default"
OF.setdefault(WEIGHT_ONLY, weight_only_problem(1, 4096, 4096, arch=str(H200)))


def emptied(problem):
    """With nothing in one dimension of one operand that is an image or a matrix, each in turn."""
    for place, operand in enumerate(
        operands_by_name(problem).values()
    ):  # not of what follows the op
        for number in range(len(operand.shape) if len(operand.shape) > 1 else 0):
            shape = tuple(0 if i == number else size for i, size in enumerate(operand.shape))
            operands = [*problem.operands]
            operands[place] = replace(operand, shape=shape)
            yield replace(problem, operands=tuple(operands))


def templates(problem):
    """Of all of it: apart, a part may be as it is."""
    return [call for call in library.calls(problem) if call.parameters and not call.apart]


@pytest.mark.parametrize("op", sorted(library.CALLS))
def test_no_template_is_offered_what_is_empty(op):
    problem = OF[op]
    assert problem.arch == str(H200)
    assert templates(problem)
    for empty in emptied(problem):
        assert not templates(empty), empty.operands
