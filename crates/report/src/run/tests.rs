//! The document of a small run as a snapshot, and what its figures mean.

use super::*;
use crate::sessions::{AppendRate, RATES_LISTED_MAX};

/// A request that arrives at `arrival` ms, answers at `first` ms and ends at `end` ms.
fn request(session: u32, turn: u32, times: [u64; 3], prompt_tokens: u32, path: Path, worker: &str) -> RequestRecord {
    let at = |millis: u64| Instant::from_nanos(millis * 1_000_000);
    RequestRecord {
        request: u64::from(session) * 10 + u64::from(turn),
        session,
        session_name: format!("s{session}"),
        agent: 0,
        turn,
        first_of_agent: turn == 0,
        arrival: at(times[0]),
        first_token: Some(at(times[1])),
        end: at(times[2]),
        itl_max: Some(Duration::from_millis(40)),
        prompt_tokens,
        cached_tokens: if turn == 0 { 0 } else { prompt_tokens - 100 },
        output_tokens: 11,
        path: Some(path),
        worker: Some(worker.to_owned()),
        prefill_worker: matches!(path, Path::Seed | Path::Reseed).then(|| "p0".to_owned()),
        error: None,
    }
}

fn failed(mut request: RequestRecord, kind: &str) -> RequestRecord {
    request.error = Some(kind.to_owned());
    request.first_token = None;
    request.itl_max = None;
    request.output_tokens = 0;
    request
}

fn small_run(seed: u64) -> RunRecord {
    let later = seed * 10;
    let requests = vec![
        request(0, 0, [0, 400, 1400], 1000, Path::Seed, "d0"),
        request(0, 1, [2000, 2100, 3100 + later], 2000, Path::Append, "d0"),
        request(1, 0, [500, 1500, 2500], 20_000, Path::Seed, "d1"),
        request(1, 1, [3000, 3900, 4900], 40_000, Path::Reseed, "d1"),
        failed(
            request(1, 2, [5000, 5000, 6000], 50_000, Path::Append, "d0"),
            "transfer_failed",
        ),
    ];
    let worker = |name: &str, role: &str| WorkerRecord {
        name: name.to_owned(),
        role: role.to_owned(),
        kv_usage_max: Some(0.75),
        evictions: Some(3),
        evicted_tokens: Some(100),
        transfers_in: Some(2),
        transfers_out: Some(1),
        transfer_errors: Some(0),
        busy: Some(Duration::from_millis(1500)),
    };
    RunRecord {
        seed,
        requests,
        workers: vec![worker("p0", "prefill"), worker("d0", "decode")],
    }
}

fn experiment() -> Experiment {
    Experiment {
        trace: "small".to_owned(),
        cluster: "1p2d".to_owned(),
        policy: "homing".to_owned(),
        time_scale: 1.0,
        block_size: Some(16),
        classes: ClassBounds::default(),
        left_out: LeftOut {
            sessions: 27,
            turns: 1700,
            ..LeftOut::default()
        },
    }
}

#[test]
fn the_document_of_a_small_run() {
    let report = Report::new(&experiment(), &[small_run(1), small_run(2), small_run(3)]);
    let json = report.to_json_pretty();
    assert_eq!(serde_json::from_str::<Report>(&json).expect("its own form"), report);
    let one_run = Report {
        runs: report.runs[..1].to_vec(),
        ..report
    };
    insta::assert_snapshot!(one_run.to_json_pretty());
}

#[test]
fn equal_runs_are_equal_bytes() {
    let json = || Report::new(&experiment(), &[small_run(1), small_run(2)]).to_json();
    assert_eq!(json(), json());
}

#[test]
fn a_run_without_requests_has_no_figures_and_no_zeros_for_them() {
    let run = Run::new(&RunRecord::default(), ClassBounds::default());
    assert_eq!(run.latency_s, Distribution::default());
    assert_eq!((run.hit_ratio, run.duration_s), (None, 0.0));
    let report = Report::new(&experiment(), &[RunRecord::default()]);
    assert!(!report.summary.contains_key("latency_s.mean"));
    assert_eq!(report.summary["requests"].mean, 0.0);
}

#[test]
fn warnings_name_what_weakens_the_conclusions() {
    let warnings = |time_scale: f64, runs: usize| {
        let runs: Vec<RunRecord> = (0..runs).map(|seed| small_run(seed as u64)).collect();
        Report::new(
            &Experiment {
                time_scale,
                ..experiment()
            },
            &runs,
        )
        .warnings
    };
    assert_eq!(warnings(1.0, 3), [""; 0]);
    assert_eq!(
        warnings(1.0, 1),
        ["1 run(s): below 3 the spread between equal runs is not known"]
    );
    assert_eq!(warnings(10.0, 3).len(), 1);
}

#[test]
fn a_session_is_starved_when_under_a_fifth_of_its_later_turns_append() {
    let session = |session: u32, appended: u32, later: u32| {
        (0..=later).map(move |turn| {
            let path = if turn > 0 && turn <= appended {
                Path::Append
            } else {
                Path::Local
            };
            request(session, turn, [0, 1, 2], 1000 + turn, path, "d0")
        })
    };
    let check = |appended: u32, later: u32, expected: [u64; 5]| {
        let requests: Vec<RequestRecord> = session(0, appended, later).collect();
        let sessions = Sessions::of(&requests);
        assert_eq!(sessions.append_rate_histogram, expected, "{appended} of {later}");
        assert_eq!(sessions.starved, expected[0]);
        assert_eq!(sessions.starved_sessions, vec!["s0"; expected[0] as usize]);
        let peak = |bucket: usize| (expected[bucket] == 1).then(|| f64::from(1000 + later));
        assert_eq!(
            (sessions.starved_peak_tokens_mean, sessions.lucky_peak_tokens_mean),
            (peak(0), peak(4))
        );
    };
    check(0, 0, [0; 5]);
    check(0, 10, [1, 0, 0, 0, 0]);
    check(1, 10, [1, 0, 0, 0, 0]);
    check(1, 6, [1, 0, 0, 0, 0]);
    check(2, 10, [0, 1, 0, 0, 0]);
    check(19, 100, [1, 0, 0, 0, 0]);
    check(79, 100, [0, 0, 0, 1, 0]);
    check(80, 100, [0, 0, 0, 0, 1]);
    check(10, 10, [0, 0, 0, 0, 1]);
    // A turn that failed on its way to an append did not append.
    let requests: Vec<RequestRecord> = session(0, 9, 9).map(|request| failed(request, "worker_lost")).collect();
    assert_eq!(Sessions::of(&requests).starved, 1);
}

#[test]
fn a_worker_of_whom_only_the_name_was_seen_is_reported() {
    let run = Run::new(&small_run(1), ClassBounds::default());
    let seen: Vec<(&str, &str, u64, u64)> = run
        .workers
        .iter()
        .map(|w| (w.name.as_str(), w.role.as_str(), w.requests, w.sessions))
        .collect();
    assert_eq!(
        seen,
        [("p0", "prefill", 3, 2), ("d0", "decode", 3, 2), ("d1", "unknown", 2, 1)]
    );
}

#[test]
fn the_first_error_is_placed_in_the_run() {
    let share = |run: &RunRecord| Run::new(run, ClassBounds::default()).first_error_at_share;
    // It arrived at 5 s and failed at 6 s, when the last request ended.
    assert_eq!(share(&small_run(1)), Some(1.0));
    let mut run = small_run(1);
    run.requests[0] = failed(run.requests[0].clone(), "transfer_failed");
    assert_eq!(share(&run), Some(rounded(1.4 / 6.0)));
    run.requests.iter_mut().for_each(|request| request.error = None);
    assert_eq!(share(&run), None);
}

#[test]
fn starved_sessions_are_named_up_to_a_bound() {
    let later = |session: u32| request(session, 1, [0, 1, 2], 500, Path::Local, "d0");
    let requests: Vec<RequestRecord> = (0..100).map(later).collect();
    let sessions = Sessions::of(&requests);
    assert_eq!((sessions.starved, sessions.starved_sessions.len()), (100, 64));
    assert_eq!(sessions.starved_sessions[63], "s63");
    assert_eq!(sessions.append_rates.len(), 100);
    let many: Vec<RequestRecord> = (0..1100).map(later).collect();
    assert_eq!(Sessions::of(&many).append_rates.len(), RATES_LISTED_MAX);
}

#[test]
fn errors_are_counted_by_the_worker_that_was_to_decode() {
    let mut run = small_run(1);
    run.requests[0] = failed(run.requests[0].clone(), "transfer_failed");
    run.requests[3] = failed(run.requests[3].clone(), "overloaded");
    // It was refused before there was a plan.
    run.requests[2] = failed(run.requests[2].clone(), "overloaded");
    run.requests[2].worker = None;
    let errors = Run::new(&run, ClassBounds::default()).errors;
    let counts = |counts: &[(&str, u64)]| {
        counts
            .iter()
            .map(|(name, count)| ((*name).to_owned(), *count))
            .collect()
    };
    let expected = Errors {
        total: 4,
        by_kind: counts(&[("overloaded", 2), ("transfer_failed", 2)]),
        by_worker: counts(&[("d0", 2), ("d1", 1)]),
    };
    assert_eq!(errors, expected);
}

#[test]
fn each_session_has_its_append_rate() {
    let mut requests = small_run(1).requests;
    // A session without later turns has none.
    requests.push(request(2, 0, [0, 1, 2], 700, Path::Seed, "d0"));
    let rate = |session: &str, later_turns: u64, append_rate: f64, peak_tokens: u32| AppendRate {
        session: session.to_owned(),
        later_turns,
        append_rate,
        peak_tokens,
    };
    // Of session 1 one later turn was a reseed, and the append failed.
    let expected = [rate("s0", 1, 1.0, 2000), rate("s1", 2, 0.0, 50_000)];
    assert_eq!(Sessions::of(&requests).append_rates, expected);
    requests[4].error = None;
    assert_eq!(Sessions::of(&requests).append_rates[1], rate("s1", 2, 0.5, 50_000));
}

#[test]
fn a_document_from_before_balance_is_still_read() {
    let mut json = serde_json::to_value(Report::new(&experiment(), &[small_run(1)])).expect("JSON");
    let run = json["runs"][0].as_object_mut().expect("an object");
    run.remove("balance").expect("it is there");
    run.remove("first_error_at_share").expect("it is there");
    run["sessions"]
        .as_object_mut()
        .expect("an object")
        .remove("starved_sessions")
        .expect("it is there");
    for (part, name) in [("sessions", "append_rates"), ("errors", "by_worker")] {
        let part = run[part].as_object_mut().expect("an object");
        part.remove(name).expect("it is there");
    }
    let report: Report = serde_json::from_value(json).expect("an older document");
    assert_eq!(report.runs[0].balance, Balance::default());
}
