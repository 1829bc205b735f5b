//! KVC v5 as the report saw it, over ten consecutive seeds, and what is left of each symptom without the mechanism that is
//! said to cause it. Everything is simulated from the same sessions; nothing is set but the parts of the stack.

use homing_lab::observe::is_dead;
use homing_lab::{Observed, Setup};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

const HARDWARE: &str = "h100x8-2p6d:kv=136K";
const SLOTS: &str = ":engine=session-slot:order=decode-first";
const TIMEOUT: &str = ":transfer_timeout=32s";
const LISTS: &str = ":dead_peers=on";

fn runs(parts: &[&str], policy: &str, seeds: u64) -> Vec<Observed> {
    let setup = Setup::new("gen:swe52", &format!("{HARDWARE}{}", parts.concat()), policy);
    println!("{}", setup.command());
    (1..=seeds)
        .map(|seed| Observed::simulate(&setup, seed).expect("a good setup"))
        .collect()
}

/// The whole stack, ten seeds.
static KVC: LazyLock<Vec<Observed>> = LazyLock::new(|| runs(&[SLOTS, TIMEOUT, LISTS], "kv-aware", 10));

fn mean(runs: &[Observed], figure: impl Fn(&Observed) -> f64) -> f64 {
    runs.iter().map(figure).sum::<f64>() / runs.len() as f64
}

/// Failed transfers of each prefill worker, the fewest first.
fn by_prefill(run: &Observed) -> [usize; 2] {
    let of = |name: &str| run.failed_transfers().filter(|line| line.from == name).count();
    let (p0, p1) = (of("p0"), of("p1"));
    [p0.min(p1), p0.max(p1)]
}

/// Decode workers that served each session.
fn workers_of_sessions(run: &Observed) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut workers: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for request in &run.record.requests {
        let of = workers.entry(&request.session_name).or_default();
        of.extend(request.worker.as_deref());
    }
    workers
}

fn histogram(run: &Observed) -> [u64; 5] {
    run.run.sessions.append_rate_histogram
}

#[test]
fn transfers_fail_in_the_hundreds_and_only_with_the_lists_of_dead_peers() {
    let kvc = mean(&KVC, Observed::errors);
    assert!((100.0..1000.0).contains(&kvc), "{kvc}");
    for run in &*KVC {
        let failed = run.failed_transfers().count();
        assert!(failed as f64 >= run.errors(), "each error is a failed transfer");
        let dead = run.failed_transfers().filter(|line| is_dead(line)).count();
        assert!(
            dead * 10 >= failed * 9,
            "{dead} of {failed} over links that count as dead"
        );
    }
    let without = mean(&runs(&[SLOTS, TIMEOUT], "kv-aware", 10), Observed::errors);
    assert!(without * 5.0 < kvc, "{without} without the lists, {kvc} with them");
}

#[test]
fn failed_transfers_gather_at_one_prefill_worker() {
    let hit: Vec<[usize; 2]> = KVC.iter().map(by_prefill).filter(|[_, worse]| *worse >= 100).collect();
    let skewed = hit.iter().filter(|[better, worse]| *worse >= 10 * better).count();
    assert!(!hit.is_empty() && 2 * skewed >= hit.len(), "{hit:?}");
}

#[test]
fn nothing_fails_without_the_timeout() {
    for run in runs(&[SLOTS], "kv-aware", 5) {
        assert_eq!(run.failed_transfers().count(), 0);
    }
}

#[test]
fn every_session_stays_on_one_worker_unless_it_may_move() {
    for run in &*KVC {
        assert!(workers_of_sessions(run).values().all(|workers| workers.len() == 1));
    }
    let moves = runs(&[SLOTS, TIMEOUT, LISTS], "kv-aware:reject_threshold=3", 1);
    let moved = workers_of_sessions(&moves[0]).into_values();
    assert!(moved.filter(|workers| workers.len() > 1).count() > 10);
}

#[test]
fn append_rates_have_two_ends_and_sessions_starve_only_with_slots() {
    let sum = |runs: &[Observed]| {
        runs.iter().map(histogram).fold([0; 5], |mut sum, histogram| {
            for (sum, count) in sum.iter_mut().zip(histogram) {
                *sum += count;
            }
            sum
        })
    };
    let slots = sum(&KVC);
    let [starved, second, _, _, fine] = slots;
    assert!(2 * (starved + fine) > slots.iter().sum(), "{slots:?}");
    assert!(starved > second, "{slots:?}");
    let blocks = sum(&runs(&[TIMEOUT, LISTS], "kv-aware", 5));
    assert_eq!(blocks[0], 0, "{blocks:?}");
}

#[test]
fn an_eviction_takes_a_session_with_slots_and_a_block_without() {
    let tokens = |runs: &[Observed]| {
        let lines: Vec<_> = runs.iter().flat_map(Observed::decode_evictions).collect();
        let decisions: u64 = lines.iter().map(|line| u64::from(line.decisions)).sum();
        lines.iter().map(|line| line.tokens).sum::<u64>() as f64 / decisions as f64
    };
    let slots = tokens(&KVC);
    assert!((10_000.0..100_000.0).contains(&slots), "{slots}");
    let blocks = tokens(&runs(&[TIMEOUT, LISTS], "kv-aware", 3));
    assert!(blocks <= 500.0, "{blocks}");
}
