"""Chats beside documents: a small version of the experiment."""

from benchmarks.simulator.scenarios import documents


def test_documents_do_not_queue_up_behind_the_bound_of_gaps() -> None:
    result = documents.measure(lambda text: None, num_requests=500)
    assert [(row["machine"], row["policy"]) for row in result["rows"]] == [
        (machine.name, policy) for machine, _ in (*documents.CLIENTS, *documents.RATES) for policy in ("fcfs", "fair")
    ]
    assert all(target["holds"] for target in result["targets"])
    table = documents.table(result)
    assert all(len(row) == len(table.columns) for row in table.rows)
