//! Why a figure of the migration paper does not come out, as far as our runs show it: each cause is a comparison of two of our
//! own figures, and is said only where they differ.

use super::{Get, LARGE_POOL, LINEAR, TRUE_SPEED, balance, of, p90, ratio, run_of, run_on, sparse_v2};
use crate::paper::Paper;
use crate::results::Results;
use crate::section::{Row, estimate};

/// Causes of a version's times: what it finds in the cache beside the baseline, and what eviction does.
pub(super) fn of_time(row: Row, results: &Results, policy: &str) -> Row {
    let [ours, linear] = [policy, LINEAR].map(|policy| of(results, policy, |run| run.run.hit_ratio));
    let [tpot, linear_tpot] = [policy, LINEAR].map(|policy| of(results, policy, |run| run.run.tpot_s.p90));
    let here = ratio(results, &run_of(policy), &run_of(LINEAR), p90);
    let large = ratio(results, &run_on(LARGE_POOL, policy), &run_on(LARGE_POOL, LINEAR), p90);
    row.because(
        ours.mean() < linear.mean(),
        format!(
            "`{policy}` finds less of its prompts in the cache than `{LINEAR}`: {} against {}; what it moves is computed again.",
            estimate(&ours, ""),
            estimate(&linear, "")
        ),
    )
    .because(
        tpot.mean() > linear_tpot.mean(),
        format!(
            "That prefill runs beside decoding: TPOT p90 {} against {}.",
            estimate(&tpot, "s"),
            estimate(&linear_tpot, "s")
        ),
    )
    .because(
        large.mean().is_some() && large.differs_from(&here),
        format!(
            "The pool matters: TTFT p90 by that of `{LINEAR}` is {}, and {} where nothing is evicted.",
            estimate(&here, "x"),
            estimate(&large, "x")
        ),
    )
}

/// The cost model believes in a speed that the hardware has at short prompts only.
pub(super) fn of_speed(row: Row, results: &Results) -> Row {
    let at = |policy: &str| ratio(results, &run_of(policy), &run_of(LINEAR), p90);
    let (assumed, real) = (at("contention"), at(TRUE_SPEED));
    row.because(
        real.mean() < assumed.mean(),
        format!(
            "The cost model takes 14,000 tokens a second for granted, which an H20 reaches at 8,000 tokens; at 50,000 it has 5,000. With \
             those, TTFT p90 of `contention` by that of `{LINEAR}` is {} instead of {}.",
            estimate(&real, "x"),
            estimate(&assumed, "x")
        ),
    )
}

/// The baseline itself is off in this figure, which calibration could not reach.
pub(super) fn of_calibration(row: Row, paper: &Paper, results: &Results, end: &str, get: Get) -> Row {
    const FAR: f64 = 1.5;
    let theirs = paper.figure(&format!("elastic.baseline.{end}")).mean();
    let ours = of(results, LINEAR, get);
    let is_far = ours
        .mean()
        .is_some_and(|ours| ours > theirs * FAR || ours * FAR < theirs);
    row.because(
        is_far,
        format!(
            "The calibrated baseline is off in the same figure: {} against {theirs} s.",
            estimate(&ours, "s")
        ),
    )
}

/// Causes of a version's balance.
pub(super) fn of_balance(row: Row, results: &Results, policy: &str) -> Row {
    let ours = of(results, policy, balance);
    let sparse = super::sample(results, &sparse_v2(), balance);
    row.because(
        policy == "unified-v2" && sparse.mean() > ours.mean(),
        format!(
            "Sessions of our trace start within a minute and find prefill pending, which spreads them; where they start one by one, over 40 \
             minutes, tokens max/min is {} instead of {}.",
            estimate(&sparse, "x"),
            estimate(&ours, "x")
        ),
    )
    .because(
        sparse.mean().is_none(),
        "Where sessions start one by one, over 40 minutes, `unified-v2` leaves a worker without any: pending prefill spreads ours.",
    )
    .because(
        sparse.mean().is_some_and(|sparse| policy != "unified-v2" || Some(sparse) <= ours.mean()),
        format!(
            "It is not that sessions start together: `unified-v2` has {} where they start one by one; `{policy}` has {}, `{LINEAR}` {}.",
            estimate(&sparse, "x"),
            estimate(&ours, "x"),
            estimate(&of(results, LINEAR, balance), "x")
        ),
    )
}
