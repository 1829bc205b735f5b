//! The clusters that cannot be built are faster than any that can, and in the right order.

use super::*;
use homing_workload::{Session, Turn};

fn turn(content: &[u64], output_tokens: u32, after: &[u32]) -> Turn {
    Turn {
        agent: 0,
        prompt_tokens: content.len() as u32 * 16 + 3,
        output_tokens,
        content: content.iter().copied().collect(),
        after: after.to_vec(),
        gap: Duration::from_secs(1),
    }
}

fn trace(sessions: Vec<Vec<Turn>>) -> Trace {
    let session = |(index, turns)| Session {
        id: format!("s{index}"),
        start: Some(Duration::ZERO),
        turns,
    };
    Trace {
        name: "test".to_owned(),
        block_size: 16,
        sessions: (0..).zip(sessions).map(session).collect(),
    }
}

fn outcome(ideal: Ideal, trace: &Trace, cluster: &str) -> Outcome {
    let cluster = Cluster::preset(cluster).expect("a preset");
    let replay = Replay::new(trace, &homing_workload::ReplayConfig::default()).expect("a good replay");
    ideal.run(trace, &cluster, &replay)
}

#[test]
fn whatever_was_shown_once_is_known() {
    let (shared, own): (Vec<u64>, Vec<u64>) = ((0..8).collect(), (0..12).collect());
    let rewritten = [0, 1, 2, 3, 70, 71, 72, 73];
    let trace = trace(vec![
        vec![
            turn(&shared, 1, &[]),
            turn(&own, 1, &[0]),
            turn(&rewritten, 1, &[1]),
            turn(&own, 1, &[2]),
        ],
        vec![turn(&rewritten[..6], 1, &[])],
        vec![turn(&[9, 1, 2], 1, &[])],
    ]);
    let mut shown = Shown::default();
    let mut check = |session, turn, blocks: u32| {
        assert_eq!(
            shown.show(&trace, TurnRef { session, turn }),
            blocks * 16,
            "{session} {turn}"
        );
    };
    check(0, 0, 0);
    check(0, 1, 8);
    check(0, 2, 4);
    check(0, 3, 12);
    check(1, 0, 6);
    check(2, 0, 0);
}

#[test]
fn a_request_alone_takes_its_steps_on_every_such_cluster() {
    let trace = trace(vec![vec![turn(&(0..1_000).collect::<Vec<_>>(), 101, &[])]]);
    let model = Cluster::preset("h200x2-dp").expect("a preset").step_model;
    let step = |tokens: u32, prefix: u32| StepShape {
        prefills: smallvec![Chunk { tokens, prefix }],
        ..StepShape::default()
    };
    let decode = StepShape {
        decode_batch: 1,
        decode_context_tokens: 16_003,
        ..StepShape::default()
    };
    let first = model.front_end() + model.step_time(&step(8_192, 0)) + model.step_time(&step(7_811, 8_192));
    let token_s = model.step_time(&decode).as_secs_f64();
    for (ideal, name) in IDEALS {
        let found = outcome(ideal, &trace, "h200x2-dp");
        let near = |found: Option<f64>, expected: f64| (found.unwrap() / expected - 1.0).abs() < 1e-6;
        assert!(near(found.ttft_p90_s, first.as_secs_f64()), "{name}: {found:?}");
        assert!(near(found.tpot_p90_s, token_s), "{name}: {found:?}");
        assert!(
            near(found.latency_mean_s, first.as_secs_f64() + 100.0 * token_s),
            "{name}: {found:?}"
        );
    }
}

#[test]
fn who_shares_workers_is_slower_and_prefills_make_it_slower_still() {
    let prompts = |session: u64| (0..500).map(|block| session << 32 | block).collect::<Vec<_>>();
    let trace = trace((0..24).map(|session| vec![turn(&prompts(session), 400, &[])]).collect());
    let [alone, undisturbed, steady, balanced] = IDEALS.map(|(ideal, _)| outcome(ideal, &trace, "h200x2-dp"));
    assert!(alone.tpot_p90_s < undisturbed.tpot_p90_s, "{alone:?} {undisturbed:?}");
    assert_eq!(alone.ttft_p90_s, undisturbed.ttft_p90_s);
    assert!(undisturbed.tpot_p90_s < steady.tpot_p90_s, "{undisturbed:?} {steady:?}");
    assert!(
        undisturbed.latency_mean_s < balanced.latency_mean_s,
        "{undisturbed:?} {balanced:?}"
    );
    assert!(
        undisturbed.ttft_p90_s < balanced.ttft_p90_s,
        "{undisturbed:?} {balanced:?}"
    );
}

/// Of the simulator's policies none is faster than what none can be, but for the noise of steps.
#[test]
fn no_policy_beats_them() {
    for (cluster, policy) in [
        ("h100x2-dp", "homing"),
        ("h100x2-dp", "dp-cache-aware"),
        ("h100x2-1p1d", "homing"),
    ] {
        let setup =
            Setup::new("gen:swe52:sessions=12", cluster, policy).arrivals(crate::setup::Arrivals::LiveSessions(6));
        for seed in 1..=2 {
            let real = Outcome::simulate(&setup, seed).expect("a good setup");
            for (ideal, name) in IDEALS {
                let found = ideal.simulate(&setup, seed).expect("a good setup");
                let figures = [
                    (found.latency_mean_s, real.latency_mean_s),
                    (found.ttft_p90_s, real.ttft_p90_s),
                    (found.tpot_p90_s, real.tpot_p90_s),
                ];
                for (found, real) in figures {
                    assert!(
                        found.unwrap() < real.unwrap() * 1.02,
                        "{name} seed {seed} of {setup:?}: {figures:?}"
                    );
                }
            }
        }
    }
}
