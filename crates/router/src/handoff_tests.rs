//! Each signal in each phase.

use super::*;

const REASON: Failure = Failure {
    reason: Reason::Lost,
    leg: Leg::Decode,
};
const PHASES: [Phase; 7] = [
    Phase::Waiting,
    Phase::Lending,
    Phase::Fetching,
    Phase::Prefilling,
    Phase::Connecting,
    Phase::Streaming,
    Phase::Yielding(REASON),
];

/// What one signal leads to in each phase, in the order of `PHASES`.
fn check(signal: Signal, expected: [Transition; 7]) {
    for (phase, expected) in PHASES.into_iter().zip(expected) {
        assert_eq!(step(phase, signal), expected, "{signal:?} while {}", phase.as_str());
    }
}

#[test]
fn a_client_that_goes_takes_its_legs_with_it() {
    let drop = Next::Drop;
    let both = Cancels::Both.then(drop);
    check(
        Signal::ClientGone,
        [
            then(drop),
            Cancels::Lend.then(drop),
            Cancels::History.then(drop),
            Cancels::Prefill.then(drop),
            both,
            Cancels::Decode.then(drop),
            then(drop),
        ],
    );
}

#[test]
fn a_lost_worker_ends_what_still_needs_it() {
    let lost = |leg| Failure {
        reason: Reason::Lost,
        leg,
    };
    for leg in [Leg::Prefill, Leg::Decode] {
        let streaming = match leg {
            Leg::Lend | Leg::Fetch | Leg::Prefill => then(Next::Stay),
            Leg::Decode => Cancels::Decode.then(Next::Yield(lost(leg))),
        };
        check(
            Signal::Lost(leg),
            [
                then(Next::Stay),
                Cancels::Lend.then(Next::Replan(lost(leg))),
                Cancels::History.then(Next::Replan(lost(leg))),
                Cancels::Prefill.then(Next::Replan(lost(leg))),
                Cancels::Both.then(Next::Yield(lost(leg))),
                streaming,
                then(Next::Stay),
            ],
        );
    }
}

#[test]
fn a_failed_decode_leg_is_planned_again_where_that_is_exact() {
    let failure = Failure {
        reason: Reason::Transfer,
        leg: Leg::Decode,
    };
    let (again, told) = (Next::Replan(failure), Next::Reject(failure));
    check(
        Signal::DecodeFailed(FailureCause::Transfer, Cut::Resumable),
        [
            then(Next::Stay),
            then(Next::Stay),
            then(Next::Stay),
            Cancels::Prefill.then(again),
            Cancels::Prefill.then(again),
            then(again),
            then(Next::Replan(REASON)),
        ],
    );
    check(
        Signal::DecodeFailed(FailureCause::Transfer, Cut::Final),
        [
            then(Next::Stay),
            then(Next::Stay),
            then(Next::Stay),
            Cancels::Prefill.then(told),
            Cancels::Prefill.then(told),
            then(told),
            then(Next::Reject(REASON)),
        ],
    );
    let refused = Failure {
        reason: Reason::Invalid,
        leg: Leg::Prefill,
    };
    assert_eq!(
        step(Phase::Prefilling, Signal::Failed(Leg::Prefill, FailureCause::Invalid)),
        then(Next::Reject(refused)),
        "what one worker refuses, another would too"
    );
}

#[test]
fn an_answer_that_is_complete_is_complete() {
    let (stay, finish) = (then(Next::Stay), then(Next::Finish));
    check(Signal::Finished, [stay, stay, stay, stay, finish, finish, finish]);
    check(
        Signal::FirstToken,
        [stay, stay, stay, stay, then(Next::Stream), stay, stay],
    );
}

#[test]
fn a_leg_that_is_done_sends_the_next_one_and_no_other() {
    let done = |leg, phase, next| {
        let expected = PHASES.map(|other| then(if other == phase { Next::Send(next) } else { Next::Stay }));
        check(Signal::Done(leg), expected);
    };
    done(Leg::Lend, Phase::Lending, Leg::Fetch);
    done(Leg::Fetch, Phase::Fetching, Leg::Prefill);
    done(Leg::Prefill, Phase::Prefilling, Leg::Decode);
    check(Signal::Done(Leg::Decode), PHASES.map(|_| then(Next::Stay)));
}

#[test]
fn a_history_that_does_not_come_never_ends_a_request() {
    use FailureCause::{Busy, Engine, Invalid, Transfer, Unreachable};
    let reasons = [
        (Unreachable, Reason::Unreachable),
        (Busy, Reason::Busy),
        (Transfer, Reason::Transfer),
        (Engine, Reason::Transfer),
        (Invalid, Reason::Transfer),
    ];
    for (cause, reason) in reasons {
        let again = |leg| Next::Replan(Failure { reason, leg });
        let (lend, fetch) = (Signal::Failed(Leg::Lend, cause), Signal::Failed(Leg::Fetch, cause));
        assert_eq!(step(Phase::Lending, lend), then(again(Leg::Lend)));
        assert_eq!(step(Phase::Fetching, lend), Cancels::Fetch.then(again(Leg::Lend)));
        assert_eq!(step(Phase::Fetching, fetch), Cancels::Lend.then(again(Leg::Fetch)));
        assert_eq!(step(Phase::Prefilling, fetch), then(Next::Stay), "it has come already");
    }
    let slow = |leg| {
        Next::Replan(Failure {
            reason: Reason::Transfer,
            leg,
        })
    };
    assert_eq!(
        step(Phase::Lending, Signal::Overdue),
        Cancels::Lend.then(slow(Leg::Lend))
    );
    assert_eq!(
        step(Phase::Fetching, Signal::Overdue),
        Cancels::History.then(slow(Leg::Fetch))
    );
    // Once the history is there its lender does not matter.
    for phase in [Phase::Prefilling, Phase::Connecting, Phase::Streaming] {
        assert_eq!(step(phase, Signal::Lost(Leg::Lend)), then(Next::Stay));
    }
}
