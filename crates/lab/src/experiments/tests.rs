//! What holds of all experiments together, and the arithmetic that they share, on runs that are made by hand.

use super::*;
use crate::observe::{is_direct, is_fallback};
use homing_report::logs::{EvictionCause, EvictionLine, TransferLine};
use homing_report::{ClassBounds, Path, RequestRecord, Run, RunRecord, WorkerRecord};
use homing_units::Instant;
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn setups_can_be_read_and_names_differ() {
    let names: BTreeSet<&str> = ALL.iter().map(|experiment| experiment.name).collect();
    assert_eq!(names.len(), ALL.len());
    for setup in ALL.iter().flat_map(|experiment| (experiment.setups)()) {
        let config = setup.trace(1).and_then(|trace| setup.config(&trace, 1));
        config.unwrap_or_else(|error| panic!("{}: {error}", setup.command()));
    }
}

#[test]
fn the_most_uneven_is_compared_with_the_mean() {
    let check = |values: &[f64], expected: Option<f64>| assert_eq!(largest_by_mean(values), expected, "{values:?}");
    // The papers' transfer errors of their six decode workers: 153 by 61.5.
    check(&[0.0, 4.0, 153.0, 29.0, 90.0, 93.0], Some(153.0 / 61.5));
    check(&[2.0, 2.0], Some(1.0));
    check(&[0.0, 0.0], None);
    check(&[], None);
}

/// A request of a session's agent 0 that lives from `from` to `to` in seconds.
fn request(session: u32, turn: u32, [from, to]: [u64; 2], path: Path, error: Option<&str>) -> RequestRecord {
    let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
    RequestRecord {
        request: u64::from(session) * 100 + u64::from(turn),
        session,
        session_name: format!("s{session}"),
        agent: 0,
        turn,
        first_of_agent: turn == 0,
        arrival: at(from),
        first_token: None,
        end: at(to),
        itl_max: None,
        prompt_tokens: 1000 * (turn + 1),
        cached_tokens: 0,
        output_tokens: 1,
        path: Some(path),
        worker: Some("d0".to_owned()),
        prefill_worker: (path != Path::Append).then(|| "p1".to_owned()),
        error: error.map(str::to_owned),
    }
}

/// A run of one prefill worker more than is used, two decode workers and these requests.
pub(super) fn observed(requests: Vec<RequestRecord>) -> Observed {
    let worker = |(name, role): (&str, &str)| WorkerRecord {
        name: name.to_owned(),
        role: role.to_owned(),
        ..WorkerRecord::default()
    };
    let workers = [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")];
    let record = RunRecord {
        seed: 1,
        requests,
        workers: workers.map(worker).into(),
    };
    Observed {
        run: Run::new(&record, ClassBounds::default()),
        record,
        transfers: Vec::new(),
        evictions: Vec::new(),
        bindings: Vec::new(),
        pauses: Vec::new(),
        admissions: BTreeMap::new(),
        reasons: BTreeMap::new(),
    }
}

/// Two sessions: one direct, one fallback, one failed, and the first turns.
pub(super) fn four_kinds() -> Observed {
    observed(vec![
        request(0, 0, [0, 2], Path::Seed, None),
        request(1, 0, [1, 3], Path::Seed, None),
        request(0, 1, [5, 6], Path::Append, None),
        request(1, 1, [4, 9], Path::Reseed, None),
        request(0, 2, [10, 11], Path::Seed, Some("transfer")),
    ])
}

#[test]
fn a_first_turn_and_a_failed_one_are_neither_direct_nor_a_fallback() {
    let run = four_kinds();
    let kinds = |such: fn(&RequestRecord) -> bool| run.record.requests.iter().map(such).collect::<Vec<bool>>();
    assert_eq!(kinds(is_direct), [false, false, true, false, false]);
    assert_eq!(kinds(is_fallback), [false, false, false, true, false]);
}

#[test]
fn gaps_are_those_of_one_agent() {
    let mut gaps = four_kinds().gaps();
    gaps.sort_by(f64::total_cmp);
    // Session 0: 2 to 5 and 6 to 10; session 1: 3 to 4.
    assert_eq!(gaps, [1.0, 3.0, 4.0]);
}

#[test]
fn workers_are_counted_in_the_order_of_the_cluster() {
    let run = four_kinds();
    assert_eq!(run.decode_requests(), [5.0, 0.0]);
    assert_eq!(run.prefill_requests(), [0.0, 4.0]);
}

/// A transfer that failed for this reason.
pub(super) fn failed(from: &str, to: &str, error: &str) -> TransferLine {
    TransferLine {
        t: 1.0,
        request: 0,
        from: from.to_owned(),
        to: to.to_owned(),
        tokens: 1,
        bytes: None,
        duration_s: 0.0,
        error: Some(error.to_owned()),
        failed: None,
    }
}

/// An eviction of so many tokens.
pub(super) fn evicted(worker: &str, cause: EvictionCause, tokens: u64, session: Option<u64>) -> EvictionLine {
    let blocks = u32::try_from(tokens / 24).expect("a test's figure");
    EvictionLine {
        t: 1.0,
        worker: worker.to_owned(),
        request: None,
        blocks,
        tokens,
        cause: Some(cause),
        decisions: if session.is_some() { 1 } else { blocks },
        session,
    }
}
