//! Verdicts of hand-computed cases, the paired interval against a naive model, and what is said loudly.

use super::*;
use crate::record::{Path, RequestRecord};
use crate::run::{Experiment, RunRecord};
use crate::stats::{quantile, sorted};
use homing_units::Instant;
use proptest::prelude::*;

fn request(latency_ms: u64, error: Option<&str>) -> RequestRecord {
    let at = |millis: u64| Instant::from_nanos(millis * 1_000_000);
    RequestRecord {
        request: 0,
        session: 0,
        session_name: "s0".to_owned(),
        agent: 0,
        turn: 0,
        first_of_agent: true,
        arrival: at(0),
        first_token: Some(at(latency_ms / 2)),
        end: at(latency_ms),
        itl_max: None,
        prompt_tokens: 100,
        cached_tokens: 0,
        output_tokens: 10,
        path: Some(Path::Local),
        worker: Some("w0".to_owned()),
        prefill_worker: None,
        error: error.map(str::to_owned),
    }
}

/// A report with one request a run; `first_seed` is the first run's.
fn source(name: &str, first_seed: u64, latencies_ms: &[u64]) -> Source {
    let runs: Vec<RunRecord> = latencies_ms
        .iter()
        .zip(first_seed..)
        .map(|(&latency, seed)| RunRecord {
            seed,
            requests: vec![request(latency, None)],
            workers: Vec::new(),
        })
        .collect();
    Source {
        name: name.to_owned(),
        report: Report::new(&Experiment::example(), &runs),
    }
}

#[test]
fn a_winner_is_called_only_when_intervals_lie_apart() {
    let check = |a: &[u64], b: &[u64], verdict: Verdict, winner: Option<&str>| {
        let comparison = Comparison::of(&[source("a", 1, a), source("b", 1, b)]);
        let metric = comparison.metric("latency_s.mean").expect("it has one");
        assert_eq!(
            (metric.verdict, metric.winner.as_deref()),
            (verdict, winner),
            "{a:?} {b:?}"
        );
    };
    check(&[1000, 1010, 1020], &[500, 510, 520], Verdict::Better, Some("B"));
    check(&[500, 510, 520], &[1000, 1010, 1020], Verdict::Better, Some("A"));
    // The interval of three runs is their range: these overlap in [0.515, 0.520], however far the means are apart.
    check(&[100, 110, 520], &[515, 5100, 5200], Verdict::NotDistinguishable, None);
    // Intervals that touch overlap.
    check(&[100, 110, 120], &[120, 130, 140], Verdict::NotDistinguishable, None);
    check(&[100, 100, 100], &[100, 100, 100], Verdict::Equal, None);
    check(&[100, 100, 100], &[101, 101, 101], Verdict::Better, Some("A"));
    check(&[100, 101], &[500, 501], Verdict::TooFewRuns, None);
    check(&[100, 101, 102], &[500, 501], Verdict::TooFewRuns, None);
    check(&[100, 101, 102, 103, 104], &[500], Verdict::OneRun, None);
    check(&[100], &[500], Verdict::OneRun, None);
}

#[test]
fn the_figures_of_a_pair_are_those_of_the_hand() {
    let comparison = Comparison::of(&[source("a", 1, &[1000, 2000, 3000]), source("b", 1, &[500, 1000, 1800])]);
    let metric = comparison.metric("latency_s.mean").expect("it has one");
    let [a, b] = [0, 1].map(|side: usize| metric.reports[side].expect("it has one"));
    assert_eq!((a.mean, a.stdev, a.ci95), (2.0, Some(1.0), Some([1.0, 3.0])));
    assert_eq!((b.mean, b.ci95), (1.1, Some([0.5, 1.8])));
    let pair = &metric.pairs[0];
    assert_eq!((pair.difference, pair.relative), (Some(-0.9), Some(-0.45)));
    // By seed: -0.5, -1.0, -1.2. The interval of three is their range: apart from zero, though the sides overlap.
    let paired = pair.paired.expect("same seeds");
    assert_eq!((paired.n, paired.mean, paired.ci95), (3, -0.9, Some([-1.2, -0.5])));
    assert!(paired.apart_from_zero);
    assert_eq!(pair.verdict, Verdict::NotDistinguishable, "the stricter rule decides");
}

#[test]
fn pairing_needs_the_same_seeds_on_the_same_workload() {
    let paired = |a: &Source, b: &Source| {
        let comparison = Comparison::of(&[a.clone(), b.clone()]);
        comparison.metric("latency_s.mean").expect("it has one").pairs[0]
            .paired
            .is_some()
    };
    let (a, b) = (source("a", 1, &[1, 2, 3]), source("b", 1, &[4, 5, 6]));
    assert!(paired(&a, &b));
    assert!(!paired(&a, &source("b", 2, &[4, 5, 6])), "other seeds");
    let mut other = b.clone();
    other.report.cluster = "another".to_owned();
    assert!(paired(&a, &other), "another cluster serves the same work");
    other.report.trace = "another".to_owned();
    assert!(!paired(&a, &other), "another trace is other work");
    let mut twice = b;
    twice.report.runs[1].seed = 1;
    assert!(
        !paired(&twice, &twice.clone()),
        "a seed that was run twice pairs with nothing"
    );
}

#[test]
fn a_winner_of_many_beats_every_other() {
    let (fast, middle, slow) = ([100, 101, 102], [200, 201, 202], [201, 203, 205]);
    let comparison = |sides: [&[u64]; 3]| {
        let comparison = Comparison::of(&[
            source("a", 1, sides[0]),
            source("b", 1, sides[1]),
            source("c", 1, sides[2]),
        ]);
        let metric = comparison.metric("latency_s.mean").expect("it has one").clone();
        (
            metric.verdict,
            metric.winner,
            text::said(
                &comparison
                    .metrics
                    .into_iter()
                    .find(|m| m.name == "latency_s.mean")
                    .expect("it has one"),
            ),
        )
    };
    assert_eq!(
        comparison([&slow, &fast, &middle]),
        (Verdict::Better, Some("B".to_owned()), "B beats all others".to_owned())
    );
    assert_eq!(
        comparison([&middle, &slow, &[900, 910, 920]]),
        (
            Verdict::Differs,
            None,
            "no winner; A better than C (-78%); B better than C (-78%)".to_owned()
        )
    );
    assert_eq!(comparison([&slow, &middle, &slow]).0, Verdict::NotDistinguishable);
}

#[test]
fn unlike_things_are_said_loudly() {
    let a = source("a", 1, &[1, 2, 3]);
    let mut b = source("b", 2, &[1, 2, 3]);
    b.report.trace = "u".to_owned();
    b.report.cluster = "d".to_owned();
    b.report.time_scale = 10.0;
    b.report.block_size = None;
    b.report.classes.warm_below = 1;
    b.report.left_out.turns = 9;
    b.report.policy = "sticky".to_owned();
    let comparison = Comparison::of(&[a.clone(), b]);
    let what: Vec<&str> = comparison.unlike.iter().map(|unlike| unlike.what.as_str()).collect();
    assert_eq!(
        what,
        [
            "trace",
            "cluster",
            "time scale",
            "block size",
            "classes",
            "left out",
            "seeds"
        ]
    );
    assert_eq!(comparison.unlike[6].values, ["1 2 3", "2 3 4"]);
    let text = comparison.to_text();
    assert!(
        text.contains("COMPARING UNLIKE THINGS") && text.contains("time scale: A 1 | B 10"),
        "{text}"
    );
    let alike = Comparison::of(&[a.clone(), a]);
    assert_eq!(alike.unlike, []);
    assert!(!alike.to_text().contains("UNLIKE"));
}

#[test]
fn what_weakens_a_verdict_is_noted() {
    let notes = |sources: &[Source]| Comparison::of(sources).notes.join("\n");
    let three = source("a", 1, &[1, 2, 3]);
    assert!(notes(&[three.clone(), source("b", 1, &[9])]).contains("B is one run: one run proves nothing"));
    assert!(notes(&[three.clone(), source("b", 1, &[9, 9])]).contains("B has 2 runs: 3 or more are needed"));
    let constant = source("a", 1, &[2, 2, 2]);
    assert!(
        notes(&[constant.clone(), constant]).is_empty(),
        "equal figures cannot stand apart by chance"
    );
    assert!(notes(&[three.clone(), source("b", 1, &[9, 8, 7])]).contains("1 figure in 10"));
    let failing = RunRecord {
        seed: 1,
        requests: vec![request(5, None), request(5, Some("transfer_failed"))],
        workers: Vec::new(),
    };
    let mut lost = three;
    lost.report = Report::new(&Experiment::example(), &[failing]);
    assert!(notes(&[lost]).contains("A lost 50.0% of its requests (1 of 2)"));
}

#[test]
fn the_chance_that_is_stated_is_that_of_all_arrangements() {
    // Of all ways to deal 2n different values to two sides, in which share does one side lie wholly below the other?
    let share = |runs: u32| {
        let all = (0_u32..1 << (2 * runs)).filter(|side| side.count_ones() == runs);
        let low = (1_u32 << runs) - 1;
        let (mut apart, mut count) = (0, 0);
        for side in all {
            apart += u32::from(side == low || side == low << runs);
            count += 1;
        }
        (apart, count)
    };
    assert_eq!(share(3), (2, 20));
    assert_eq!(share(5), (2, 252));
}

#[test]
fn the_document_is_read_back_and_equal_input_is_equal_bytes() {
    let comparison = || Comparison::of(&[source("a", 1, &[10, 20, 30]), source("b", 1, &[12, 24, 39])]);
    let json = comparison().to_json();
    assert_eq!(
        serde_json::from_str::<Comparison>(&json).expect("its own form"),
        comparison()
    );
    assert_eq!(json, comparison().to_json());
    assert_eq!(
        Comparison::of(&[source("a", 1, &[10])])
            .metric("latency_s.p50")
            .expect("it has one")
            .verdict,
        Verdict::Missing
    );
}

/// The exact interval of the mean of all n^n resamples.
fn naive_interval(values: &[f64]) -> [f64; 2] {
    let mut means = vec![0.0];
    for _ in values {
        means = means
            .iter()
            .flat_map(|sum| values.iter().map(move |value| sum + value))
            .collect();
    }
    let means = sorted(means.into_iter().map(|sum| sum / values.len() as f64).collect());
    [25, 975].map(|per_mille| quantile(&means, per_mille).expect("there are some"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_paired_interval_is_near_that_of_all_resamples(pairs in proptest::collection::vec((100_u64..2000, 100_u64..2000), 5)) {
        let (a, b): (Vec<u64>, Vec<u64>) = pairs.iter().copied().unzip();
        let comparison = Comparison::of(&[source("a", 1, &a), source("b", 1, &b)]);
        let paired = comparison.metric("latency_s.mean").expect("it has one").pairs[0].paired.expect("same seeds");
        let differences: Vec<f64> = pairs.iter().map(|&(a, b)| (b as f64 - a as f64) / 1000.0).collect();
        let exact = naive_interval(&differences);
        let range = sorted(differences.clone());
        let width = range[range.len() - 1] - range[0];
        let found = paired.ci95.expect("five seeds");
        for (found, exact) in found.iter().zip(exact) {
            prop_assert!((found - exact).abs() <= 0.1 * width + 1e-6, "{found} against {exact}, of {differences:?}");
        }
    }

    #[test]
    fn sides_change_places_without_changing_the_verdict(a in proptest::collection::vec(1_u64..60, 1..5), b in proptest::collection::vec(1_u64..60, 1..5)) {
        let verdict = |one: &[u64], other: &[u64]| {
            let comparison = Comparison::of(&[source("x", 1, one), source("y", 1, other)]);
            let metric = comparison.metric("latency_s.mean").expect("it has one").clone();
            (metric.verdict, metric.winner)
        };
        let (there, winner) = verdict(&a, &b);
        let (back, other) = verdict(&b, &a);
        prop_assert_eq!(there, back);
        let swapped = winner.map(|label| if label == "A" { "B" } else { "A" }.to_owned());
        prop_assert_eq!(swapped, other);
        // A winner is better in every single run where there are three a side, whose interval is their range.
        if there == Verdict::Better && a.len() == 3 && b.len() == 3 {
            prop_assert!(a.iter().max() < b.iter().min() || b.iter().max() < a.iter().min());
        }
    }
}
