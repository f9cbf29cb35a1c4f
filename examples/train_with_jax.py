"""A network in JAX over rows in a cluster: gradients by jax.grad, arrays shared with torch without a copy (DLPack).

Needs JAX (pip install jax). Run it: python examples/train_with_jax.py
"""

from collections.abc import Callable
from typing import Any

import torch
from click_data import DIMS, auc, batch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

STEPS, LR = 300, 0.05


def network() -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return initial parameters, and the function from parameters and vectors by field to logits: a factorisation
    machine."""
    import jax.numpy as jnp

    def logits(parameters: dict[str, Any], vectors: dict[str, Any]) -> Any:
        both = vectors["user"] * vectors["item"]
        return (
            parameters["bias"] + both @ parameters["scales"] + (vectors["user_weight"] + vectors["item_weight"])[:, 0]
        )

    return {"bias": jnp.zeros(()), "scales": jnp.ones(DIMS["user"])}, logits


def train(cluster: Cluster, steps: int) -> float:
    """Train; return the AUC on clicks that were not trained on."""
    import jax
    import jax.numpy as jnp

    parameters, logits = network()

    def loss_of(parameters: dict[str, Any], vectors: dict[str, Any], clicks: Any) -> Any:
        found = logits(parameters, vectors)
        return jnp.mean(jax.nn.softplus(found) - clicks * found)  # log loss

    both_gradients = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))
    fields = gt.EmbeddingGroup(
        cluster,
        "ctr",
        [gt.Field(name, dim=dim, initializer=gt.Normal(std=0.1)) for name, dim in DIMS.items()],
        optimizer=gt.Adagrad(0.2),
    )
    rows = gt.RowOptimizer(fields)
    for step in range(steps):
        mine = batch(1 + step)
        vectors = fields(mine)  # ids may be arrays of JAX, too
        of_jax = {name: jnp.from_dlpack(rows_of.detach()) for name, rows_of in vectors.items()}
        _, (dense, sparse) = both_gradients(parameters, of_jax, jnp.from_dlpack(mine["click"]))
        parameters = jax.tree.map(lambda rows_of, gradient: rows_of - LR * gradient, parameters, dense)
        torch.autograd.backward(list(vectors.values()), [torch.from_dlpack(sparse[name]) for name in vectors])
        rows.step()
        rows.zero_grad()
    test = batch(0, 4000)
    with torch.no_grad():
        of_jax = {name: jnp.from_dlpack(rows_of) for name, rows_of in fields(test).items()}
    return auc(torch.from_dlpack(logits(parameters, of_jax)), test["click"])


def by_tables(cluster: Cluster) -> float:
    """Pull rows and push their gradients without torch; those of an id that occurs twice are summed.

    Returns the loss after one step.
    """
    import jax
    import jax.numpy as jnp

    table = cluster.create_table("by hand", dim=8, optimizer=gt.SGD(0.1))
    ids = jnp.array([3, 14, 15, 3])
    rows = jnp.asarray(table.pull(ids))  # [4, 8]
    loss, gradients = jax.value_and_grad(lambda rows_of: ((rows_of - 1) ** 2).sum())(rows)
    table.push(ids, gradients)
    after = ((jnp.asarray(table.pull(ids)) - 1) ** 2).sum()
    assert after < loss
    return float(after)


def main() -> None:
    try:
        import jax  # noqa: F401
    except ImportError:
        raise SystemExit("this example needs JAX: pip install jax") from None
    with gt.local(num_shards=2) as cluster:
        by_tables(cluster)
        print(f"AUC {train(cluster, STEPS):.3f}")


if __name__ == "__main__":
    main()
