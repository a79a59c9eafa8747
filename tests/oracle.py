"""The truth: attention as a double loop in NumPy float64, with mask rules of its own.

Nothing here imports the library. A mask is a function ``sees(b, h, q, k) -> bool`` on plain integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Sees = Callable[[int, int, int, int], bool]
Array = np.ndarray

# -- masks -----------------------------------------------------------------------------------------------------


def everything() -> Sees:
    return lambda b, h, q, k: True


def causal(shift: int) -> Sees:
    """Query q stands at position q + shift."""
    return lambda b, h, q, k: not k > q + shift


def window(left: int | None, right: int | None, shift: int) -> Sees:
    def sees(b: int, h: int, q: int, k: int) -> bool:
        here = q + shift
        too_early = left is not None and k < here - left
        too_late = right is not None and k > here + right
        return not too_early and not too_late

    return sees


def key_padding(lengths: Sequence[int], side: str, S: int) -> Sees:
    def sees(b: int, h: int, q: int, k: int) -> bool:
        n = lengths[b]
        return k in (range(n) if side == "right" else range(S - n, S))

    return sees


def query_padding(lengths: Sequence[int], side: str, L: int) -> Sees:
    by_key = key_padding(lengths, side, L)
    return lambda b, h, q, k: by_key(b, h, 0, q)


def segments(query_ids: Sequence[Sequence[int]], key_ids: Sequence[Sequence[int]]) -> Sees:
    return lambda b, h, q, k: query_ids[b % len(query_ids)][q] == key_ids[b % len(key_ids)][k]


def prefix(lengths: Sequence[int]) -> Sees:
    return lambda b, h, q, k: k < lengths[b % len(lengths)]


def table(flags: Array, axes: str) -> Sees:
    """A bool array whose axes are named by the letters; an axis of size 1 broadcasts."""

    def sees(b: int, h: int, q: int, k: int) -> bool:
        at = {"b": b, "h": h, "q": q, "k": k}
        return bool(flags[tuple(at[a] if n != 1 else 0 for a, n in zip(axes, flags.shape, strict=True))])

    return sees


def both(first: Sees, second: Sees) -> Sees:
    return lambda b, h, q, k: first(b, h, q, k) and second(b, h, q, k)


def either(first: Sees, second: Sees) -> Sees:
    return lambda b, h, q, k: first(b, h, q, k) or second(b, h, q, k)


def negated(first: Sees) -> Sees:
    return lambda b, h, q, k: not first(b, h, q, k)


# -- attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Everything about one call. Indices: b batch, h query head, g its key/value head, q query, k key."""

    query: Array  # (B, Hq, L, E)
    key: Array  # (B, Hkv, S, E)
    value: Array  # (B, Hkv, S, Ev)
    scale: float
    scores: Array  # (B, Hq, L, S), with the bias, hidden pairs too
    visible: Array  # bool, the same shape
    weights: Array
    output: Array  # (B, Hq, L, Ev)
    lse: Array  # (B, Hq, L)
    entropy: Array
    max_weight: Array
    distance: Array
    received: Array  # (B, Hq, S)
    rest: Array  # (B, Hq, L), what the sink takes
    slopes: Array  # (B, Hq, L, S), of the scores by what they were before they were capped
    drops: Array | float = 1.0  # the factor of each weight: 0 where dropped, 1 / (1 - p) where kept

    def _group(self, h: int) -> int:
        return h // (self.query.shape[1] // self.key.shape[1])

    @property
    def masked_scores(self) -> Array:
        return np.where(self.visible, self.scores, -np.inf)

    @cached_property
    def alive(self) -> Array:
        return self.visible.any(axis=-1)

    @property
    def dropped_weights(self) -> Array:
        return self.weights * self.drops

    @property
    def output_size(self) -> float:
        """The largest sum of absolute terms of an output: what its rounding errors are made of."""
        group = self.query.shape[1] // self.key.shape[1]
        sums = self.dropped_weights @ np.abs(self.value).repeat(group, axis=1)
        return float(sums.max(initial=0.0))

    def dropped(self, kept: Array, p: float) -> Truth:
        """The same call with dropout of which it is known what is kept, bool (B, Hq, L, S)."""
        drops, output = np.where(kept, 1 / (1 - p), 0.0), np.zeros_like(self.output)
        for b, h, q, k in np.ndindex(*self.scores.shape):
            output[b, h, q] += self.weights[b, h, q, k] * drops[b, h, q, k] * self.value[b, self._group(h), k]
        return replace(self, output=output, drops=drops)

    def top_k(self, k: int) -> tuple[Array, Array]:
        B, H, L, S = self.scores.shape
        weights, indices = np.zeros((B, H, L, k)), np.full((B, H, L, k), -1)
        for b, h, q in np.ndindex(B, H, L):
            seen = [j for j in range(S) if self.visible[b, h, q, j]]
            for n, j in enumerate(sorted(seen, key=lambda j: -self.weights[b, h, q, j])[:k]):
                weights[b, h, q, n], indices[b, h, q, n] = self.weights[b, h, q, j], j
        return weights, indices

    def offsets(self, distances: Sequence[int]) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, L, len(distances)))
        for b, h, q in np.ndindex(B, H, L):
            for n, distance in enumerate(distances):
                k = q + S - L - distance
                if 0 <= k < S:
                    found[b, h, q, n] = self.weights[b, h, q, k]
        return found

    def mass(self, keys: Array) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, L))
        for b, h, q in np.ndindex(B, H, L):
            row = keys[b if len(keys) > 1 else 0]
            found[b, h, q] = sum(self.weights[b, h, q, k] for k in range(S) if row[k])
        return found

    @property
    def max_score(self) -> Array:
        B, H, L, S = self.scores.shape
        found = np.full((B, H, L), -np.inf)
        for b, h, q, k in np.ndindex(B, H, L, S):
            if self.visible[b, h, q, k]:
                found[b, h, q] = max(found[b, h, q], self.scores[b, h, q, k])
        return found

    @property
    def received_mean(self) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, S))
        for b, h, k in np.ndindex(B, H, S):
            given = [self.weights[b, h, q, k] for q in range(L) if self.visible[b, h, q, k]]
            found[b, h, k] = sum(given) / len(given) if given else 0.0
        return found

    @property
    def value_weighted(self) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, S))
        for b, h, q, k in np.ndindex(B, H, L, S):
            found[b, h, k] += self.weights[b, h, q, k] * math.hypot(*self.value[b, self._group(h), k])
        return found

    @property
    def contribution(self) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, S))
        for b, h, q in np.ndindex(B, H, L):
            context = sum(
                (self.weights[b, h, q, k] * self.value[b, self._group(h), k] for k in range(S)), np.zeros(1)
            )
            if square := float((context * context).sum()):
                for k in range(S):
                    part = self.weights[b, h, q, k] * self.value[b, self._group(h), k]
                    found[b, h, k] += float((part * context).sum()) / square
        return found

    @property
    def contribution_size(self) -> float:
        """What its rounding errors are made of: a context that cancels to little is divided by its square."""
        norms = np.linalg.norm(self.value, axis=-1).repeat(self.query.shape[1] // self.key.shape[1], axis=1)
        terms = self.weights * norms[:, :, None]
        square = (self.output * self.output).sum(axis=-1)
        sizes = np.divide(terms.sum(axis=-1), square, out=np.zeros_like(square), where=square > 0)
        return float((terms * sizes[..., None]).sum(axis=2).max(initial=0.0))

    @property
    def agreement(self) -> Array:
        """From the divergences of both heads to their mean; what the sink takes is one more key."""
        B, H, L, S = self.scores.shape
        shares = np.concatenate([self.weights, self.rest[..., None]], axis=-1)
        found = np.zeros((B, H, H))
        for b, h, other in np.ndindex(B, H, H):
            rows = [q for q in range(L) if self.alive[b, h, q] and self.alive[b, other, q]]
            for q in rows:
                for k in range(S + 1):
                    one, two = shares[b, h, q, k], shares[b, other, q, k]
                    for weight in (one, two):
                        if weight > 0:
                            found[b, h, other] += weight * math.log(2 * weight / (one + two)) / 2 / len(rows)
        return found

    def pattern(self, allows: Sees) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, L))
        for b, h, q, k in np.ndindex(B, H, L, S):
            if allows(b, h, q, k):
                found[b, h, q] += self.weights[b, h, q, k]
        return found

    def lookback(self, lengths: Sequence[int]) -> Array:
        B, H, L, S = self.scores.shape
        found = np.zeros((B, H, L))
        for b, h, q in np.ndindex(B, H, L):
            n = lengths[b % len(lengths)]
            means = []
            for keys in (range(min(n, S)), range(n, S)):
                seen = [self.weights[b, h, q, k] for k in keys if self.visible[b, h, q, k]]
                means.append(sum(seen) / len(seen) if seen else 0.0)
            found[b, h, q] = means[0] / sum(means) if sum(means) else 0.0
        return found

    def pooled(self, n: int) -> tuple[Array, Array]:
        """Mean and maximum over cells of queries x keys; a dead row counts in no mean."""
        B, H, L, S = self.scores.shape
        mean, top = np.zeros((B, H, n, n)), np.zeros((B, H, n, n))
        for b, h, i, j in np.ndindex(B, H, n, n):
            rows = range(math.floor(i * L / n), math.ceil((i + 1) * L / n))
            columns = range(math.floor(j * S / n), math.ceil((j + 1) * S / n))
            cell = [self.weights[b, h, q, k] for q in rows for k in columns if self.alive[b, h, q]]
            if cell:
                mean[b, h, i, j], top[b, h, i, j] = sum(cell) / len(cell), max(cell)
        return mean, top

    def gradients(self, output: Array) -> tuple[dict[str, Array], dict[str, float]]:
        """By hand, for a gradient of the output: of query, key, value, an L x S bias and the sinks.

        Also the largest sum of absolute terms of each, which is what its rounding errors are made of: a
        gradient may cancel to nothing, as that of a query that sees one key does.
        """
        B, H, L, S = self.scores.shape
        given = {"query": self.query, "key": self.key, "value": self.value, "bias": self.scores}
        given["sinks"] = np.zeros(H)
        found = {name: np.zeros_like(array) for name, array in given.items()}
        terms = {name: np.zeros_like(array) for name, array in given.items()}
        drops = np.broadcast_to(self.drops, self.scores.shape)
        for b, h, q in np.ndindex(B, H, L):
            g, weights, by_output = self._group(h), self.weights[b, h, q], output[b, h, q]
            drop = drops[b, h, q]
            by_weight = [float(by_output @ self.value[b, g, k]) * drop[k] for k in range(S)]
            sizes = [float(np.abs(by_output) @ np.abs(self.value[b, g, k])) * drop[k] for k in range(S)]
            mean = sum(weights[k] * by_weight[k] for k in range(S))
            mean_size = sum(weights[k] * sizes[k] for k in range(S))
            # Its weight times what its value, 0, would give, less the mean.
            found["sinks"][h] -= self.rest[b, h, q] * mean
            terms["sinks"][h] += self.rest[b, h, q] * mean_size
            for k in range(S):
                score = weights[k] * (by_weight[k] - mean)
                slope = self.slopes[b, h, q, k] * self.scale
                steep = (2 - self.slopes[b, h, q, k]) * self.scale  # a slope is 1 - tanh^2: terms of 1 + tanh^2
                found["value"][b, g, k] += weights[k] * drop[k] * by_output
                found["query"][b, h, q] += score * slope * self.key[b, g, k]
                found["key"][b, g, k] += score * slope * self.query[b, h, q]
                found["bias"][b, h, q, k] += score
                size = weights[k] * (sizes[k] + mean_size)
                terms["value"][b, g, k] += weights[k] * drop[k] * np.abs(by_output)
                terms["query"][b, h, q] += size * np.abs(steep * self.key[b, g, k])
                terms["key"][b, g, k] += size * np.abs(steep * self.query[b, h, q])
                terms["bias"][b, h, q, k] += size
        return found, {name: float(array.max(initial=0.0)) for name, array in terms.items()}


def attend(
    query: Array,
    key: Array,
    value: Array,
    sees: Sees,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Truth:
    """The double loop. Four axes each; `bias` broadcasts to (B, Hq, L, S) and its -inf hides; sinks (Hq,)."""
    B, H, L, E = query.shape
    S, Ev = key.shape[2], value.shape[3]
    group = H // key.shape[1]
    scale = 1 / math.sqrt(max(E, 1)) if scale is None else scale
    bias = np.broadcast_to(0.0 if bias is None else bias, (B, H, L, S))
    scores, weights = np.zeros((B, H, L, S)), np.zeros((B, H, L, S))
    visible = np.zeros((B, H, L, S), dtype=bool)
    output, received = np.zeros((B, H, L, Ev)), np.zeros((B, H, S))
    lse, entropy = np.full((B, H, L), -np.inf), np.zeros((B, H, L))
    max_weight, distance, rest = np.zeros((B, H, L)), np.zeros((B, H, L)), np.zeros((B, H, L))
    slopes = np.ones((B, H, L, S))
    for b, h, q in np.ndindex(B, H, L):
        at, g = (b, h, q), h // group
        for k in range(S):
            score = scale * float(query[b, h, q] @ key[b, g, k])
            if softcap is not None:
                capped = softcap * math.tanh(score / softcap)
                score, slopes[b, h, q, k] = capped, 1 - (capped / softcap) ** 2
            scores[b, h, q, k] = score + bias[b, h, q, k]
            visible[b, h, q, k] = sees(b, h, q, k) and bias[b, h, q, k] != -np.inf
        seen = [k for k in range(S) if visible[b, h, q, k]]
        if not seen:
            continue
        logits = [scores[b, h, q, k] for k in seen] + ([] if sinks is None else [float(sinks[h])])
        top = max(logits)
        lse[at] = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
        rest[at] = 0.0 if sinks is None else math.exp(sinks[h] - lse[at])
        for k in seen:
            log_weight = scores[b, h, q, k] - lse[at]
            weight = math.exp(log_weight)
            weights[b, h, q, k] = weight
            output[at] += weight * value[b, g, k]
            entropy[at] -= weight * log_weight
            max_weight[at] = max(max_weight[at], weight)
            distance[at] += weight * abs(q + S - L - k)
            received[b, h, k] += weight
    statistics = (lse, entropy, max_weight, distance, received, rest)
    return Truth(query, key, value, scale, scores, visible, weights, output, *statistics, slopes)
