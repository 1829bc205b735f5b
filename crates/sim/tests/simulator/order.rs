//! One session that floods a cluster, and what the others feel of it.

use super::common::{BLOCK, config, run};
use homing_sim::SimOutcome;
use homing_units::Duration;
use homing_workload::{Session, Start, Trace, Turn};

/// A turn of a prompt of its own: nothing of it is anywhere.
fn turn(content: u64, blocks: u64, after: Option<u32>) -> Turn {
    Turn {
        agent: 0,
        prompt_tokens: blocks as u32 * BLOCK,
        output_tokens: 200,
        content: (content << 32..(content << 32) + blocks).collect(),
        after: after.into_iter().collect(),
        gap: Duration::from_secs(1),
    }
}

/// A session that asks for eighty turns at once, and six that ask one by one, beginning a little later.
fn flooded() -> Trace {
    let flood = Session {
        id: "flood".to_owned(),
        start: Some(Duration::ZERO),
        turns: (0..80).map(|index| turn(1 + index, 250, None)).collect(),
    };
    let modest = (0..6).map(|session| Session {
        id: format!("modest-{session}"),
        start: Some(Duration::from_secs(5 + session)),
        turns: (0..8_u32)
            .map(|index| turn(1_000 + session * 100 + u64::from(index), 250, index.checked_sub(1)))
            .collect(),
    });
    Trace {
        name: "flooded".to_owned(),
        block_size: BLOCK,
        sessions: std::iter::once(flood).chain(modest).collect(),
    }
}

/// Mean and longest time to first token of the modest sessions and of the flood, in seconds.
fn ttft_s(outcome: &SimOutcome) -> [(f64, f64); 2] {
    let of = |flood: bool| {
        let records = outcome
            .run
            .requests
            .iter()
            .filter(|record| (record.session == 0) == flood);
        let all: Vec<f64> = records
            .map(|record| record.ttft().expect("every turn is answered").as_secs_f64())
            .collect();
        (
            all.iter().sum::<f64>() / all.len() as f64,
            all.iter().copied().fold(0.0, f64::max),
        )
    };
    [of(false), of(true)]
}

#[test]
fn a_session_that_floods_the_queue_waits_for_the_others_and_not_they_for_it() {
    let trace = flooded();
    let served = |order: &str| {
        let mut config = config(&trace, "h100x1-dp:kv=10K", &format!("homing:pace_s=0:order={order}"));
        config.replay.start = Start::Recorded;
        ttft_s(&run(&trace, &config))
    };
    let ([held_up, _], [modest, flood]) = (served("arrival"), served("service"));

    let (mean, longest) = (modest.0 * 2.0, modest.1 * 2.0);
    assert!(
        mean < held_up.0 && longest < held_up.1,
        "mean and longest {modest:?} s by service, {held_up:?} s by arrival"
    );
    let bound_s = 60.0 + 60.0;
    assert!(flood.1 < bound_s, "the flood does not starve: {flood:?}");
}
