//! Each fault does what it says to those whom it concerns, and nothing to the others.

use crate::common::{config, one_session, run};
use homing_report::RequestRecord;
use homing_sim::fault::schedule::parse;
use homing_sim::{SimConfig, SimError, simulate};
use homing_units::Duration;
use homing_workload::Trace;

/// One long answer, asked for after 1 s, and a second turn 1 s after it.
fn story() -> Trace {
    one_session(&[(2_000, 400), (2_500, 20)])
}

/// The requests of the story with these faults on two workers, and without any.
fn with(cluster: &str, faults: &str) -> (Vec<RequestRecord>, Vec<RequestRecord>) {
    let trace = story();
    let mut config = config(&trace, cluster, "homing");
    config.noise = false;
    config.thorough = true;
    let undisturbed = run(&trace, &config).run.requests;
    config.faults = parse(faults).expect(faults);
    (run(&trace, &config).run.requests, undisturbed)
}

fn latency(request: &RequestRecord) -> Duration {
    request.end - request.arrival
}

/// How much longer the first turn takes with these faults, and how it ends.
fn check(cluster: &str, faults: &str, at_least_ms: u64, at_most_ms: u64, error: Option<&str>) {
    let (disturbed, undisturbed) = with(cluster, faults);
    let longer = latency(&disturbed[0]).saturating_sub(latency(&undisturbed[0]));
    let bounds = Duration::from_millis(at_least_ms)..=Duration::from_millis(at_most_ms);
    assert!(bounds.contains(&longer), "`{faults}` made it `{longer:?}` longer");
    assert_eq!(disturbed[0].error.as_deref(), error, "{faults}");
    assert_eq!(disturbed[1].error, None, "{faults}: the next turn goes on");
}

#[test]
fn faults_of_one_worker_cost_what_they_last() {
    let one = "h200x1-dp";
    check(one, "2s stall 0 700ms", 690, 710, None);
    check(one, "2s slow 0 200%; 2500ms slow 0 100%", 200, 300, None);
    check(one, "2s pause 0; 2500ms resume 0", 460, 510, None);
    check(one, "2s answers 0 600ms", 0, 600, None);
    check(one, "2s answers 0 twice; 2s kv 0 3 twice; 2s loads 0 3", 0, 0, None);
    check(one, "2s router 300ms", 0, 10, None);
    check(one, "2s hang-up 0", 0, 0, Some("client_gone"));
}

#[test]
fn another_worker_goes_on_where_one_cannot() {
    let (disturbed, undisturbed) = with("h200x2-dp", "");
    assert_eq!(disturbed, undisturbed);
    let home = undisturbed[0].worker.clone().expect("it was served");
    let number = &home[1..];
    for fault in ["crash", "pause", "break"] {
        let (disturbed, _) = with("h200x2-dp", &format!("2s {fault} {number}"));
        assert_eq!(disturbed[0].error, None, "{fault}");
        assert_eq!(disturbed[0].output_tokens, 400, "{fault}");
        assert_ne!(
            disturbed[0].worker.as_ref(),
            Some(&home),
            "{fault}: it went on elsewhere"
        );
    }
}

#[test]
fn a_link_that_is_cut_or_stalled_costs_an_attempt() {
    let (_, seeded) = with("h200x2-1p1d", "");
    assert!(seeded[0].prefill_worker.is_some(), "the first turn is a seed");
    // Until the link is up again; a cut is seen at once, a stall by the decode worker's clock.
    check("h200x2-1p1d", "0s link 0>1 stalled; 3s link 0>1 up", 1_500, 2_000, None);
    check("h200x2-1p1d", "0s link 0>1 400%", 0, 500, None);
    let (cut, _) = with("h200x2-1p1d", "0s link 0>1 cut");
    assert!(
        cut.iter().all(|request| request.error.is_none()),
        "a worker that decodes can prefill: {cut:?}"
    );
}

#[test]
fn wrong_workers_are_refused() {
    let trace = story();
    for faults in ["0s pause 2", "0s link 0>2 cut", "0s stranger 9 10+10"] {
        let config = SimConfig {
            faults: parse(faults).expect(faults),
            ..config(&trace, "h200x2-dp", "homing")
        };
        let error = simulate(&trace, &config).expect_err(faults);
        assert!(matches!(error, SimError::NoSuchWorker { .. }), "{error}");
    }
}
