//! The life of one errand: lending and carrying, or computing, and then it is over. Like the life of a request it is a pure function of
//! phase and signal, without a wildcard; unlike that one it has no second attempt. Nobody waits for an errand, so whatever goes
//! wrong ends it, and what was out is cancelled.

use crate::action::ErrandOutcome;
use crate::event::Leg;

/// Where an errand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Who holds the KV is asked to hold it for who fetches it.
    Lending,
    /// It is on its way.
    Carrying,
    /// Its destination computes it.
    Computing,
}

/// Something that happened to an errand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// A leg has ended well.
    Done(Leg),
    /// A leg has failed.
    Failed(Leg),
    /// A worker that has part in it was lost.
    Lost,
    /// Its phase has taken too long.
    Overdue,
    /// A client's turn comes first.
    Unwanted,
}

/// What a signal leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing.
    Stay,
    /// The KV is held: send the fetch leg.
    Carry,
    /// It is over, and these legs are to be cancelled.
    End(ErrandOutcome, &'static [Leg]),
}

/// What a signal does to an errand in a phase.
pub(crate) const fn step(phase: Phase, signal: Signal) -> Next {
    match phase {
        Phase::Lending => lending(signal),
        Phase::Carrying => carrying(signal),
        Phase::Computing => computing(signal),
    }
}

const fn lending(signal: Signal) -> Next {
    match signal {
        Signal::Done(Leg::Lend) => Next::Carry,
        Signal::Failed(Leg::Lend) => Next::End(ErrandOutcome::Failed, &[]),
        Signal::Lost | Signal::Overdue => Next::End(ErrandOutcome::Failed, &[Leg::Lend]),
        Signal::Unwanted => Next::End(ErrandOutcome::Dropped, &[Leg::Lend]),
        Signal::Done(Leg::Fetch | Leg::Prefill | Leg::Decode)
        | Signal::Failed(Leg::Fetch | Leg::Prefill | Leg::Decode) => Next::Stay,
    }
}

/// The lender holds the KV until it was fetched, so it is told of whatever ends this early.
const fn carrying(signal: Signal) -> Next {
    match signal {
        Signal::Done(Leg::Fetch) => Next::End(ErrandOutcome::Landed, &[]),
        Signal::Failed(Leg::Fetch) => Next::End(ErrandOutcome::Failed, &[Leg::Lend]),
        Signal::Failed(Leg::Lend) => Next::End(ErrandOutcome::Failed, &[Leg::Fetch]),
        Signal::Lost | Signal::Overdue => Next::End(ErrandOutcome::Failed, &[Leg::Lend, Leg::Fetch]),
        Signal::Unwanted => Next::End(ErrandOutcome::Dropped, &[Leg::Lend, Leg::Fetch]),
        Signal::Done(Leg::Lend | Leg::Prefill | Leg::Decode) | Signal::Failed(Leg::Prefill | Leg::Decode) => Next::Stay,
    }
}

const fn computing(signal: Signal) -> Next {
    match signal {
        Signal::Done(Leg::Fetch) => Next::End(ErrandOutcome::Landed, &[]),
        Signal::Failed(Leg::Fetch) => Next::End(ErrandOutcome::Failed, &[]),
        Signal::Lost | Signal::Overdue => Next::End(ErrandOutcome::Failed, &[Leg::Fetch]),
        Signal::Unwanted => Next::End(ErrandOutcome::Dropped, &[Leg::Fetch]),
        Signal::Done(Leg::Lend | Leg::Prefill | Leg::Decode)
        | Signal::Failed(Leg::Lend | Leg::Prefill | Leg::Decode) => Next::Stay,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ErrandOutcome::{Dropped, Failed, Landed};

    /// Runs signals from a phase on; gives how it ended, and the legs that were out then and were not cancelled.
    #[track_caller]
    fn check(first: Phase, signals: &[Signal], expected: Option<ErrandOutcome>) {
        let mut phase = first;
        let mut out = vec![if first == Phase::Lending { Leg::Lend } else { Leg::Fetch }];
        let mut held = Vec::new();
        let mut ended = None;
        for signal in signals {
            assert_eq!(ended, None, "{signals:?}: nothing is told of an errand that is over");
            if let Signal::Done(leg) | Signal::Failed(leg) = signal
                && let Some(index) = out.iter().position(|other| other == leg)
            {
                out.remove(index);
                // What was lent is held until it is fetched.
                held.extend((*signal == Signal::Done(Leg::Lend)).then_some(Leg::Lend));
            }
            match step(phase, *signal) {
                Next::Stay => {}
                Next::Carry => {
                    phase = Phase::Carrying;
                    out.push(Leg::Fetch);
                }
                Next::End(outcome, cancels) => {
                    let landed = outcome == Landed;
                    let left = out.iter().chain(&held).filter(|leg| !cancels.contains(leg));
                    let left: Vec<_> = left.filter(|leg| !(landed && **leg == Leg::Lend)).collect();
                    assert!(
                        left.is_empty() || *signal == Signal::Failed(Leg::Lend),
                        "{signals:?} leaves {left:?}"
                    );
                    ended = Some(outcome);
                }
            }
        }
        assert_eq!(ended, expected, "{signals:?}");
    }

    #[test]
    fn whatever_happens_ends_an_errand_and_nothing_of_it_is_left() {
        use Leg::{Fetch, Lend};
        let lent = Signal::Done(Lend);
        for (signals, expected) in [
            (&[lent, Signal::Done(Fetch)][..], Some(Landed)),
            (&[lent], None),
            (&[lent, lent, Signal::Done(Fetch)], Some(Landed)),
            (&[Signal::Done(Fetch), Signal::Failed(Fetch)], None),
            (&[Signal::Failed(Lend)], Some(Failed)),
            (&[Signal::Lost], Some(Failed)),
            (&[Signal::Overdue], Some(Failed)),
            (&[Signal::Unwanted], Some(Dropped)),
            (&[lent, Signal::Failed(Fetch)], Some(Failed)),
            (&[lent, Signal::Failed(Lend)], Some(Failed)),
            (&[lent, Signal::Lost], Some(Failed)),
            (&[lent, Signal::Overdue], Some(Failed)),
            (&[lent, Signal::Unwanted], Some(Dropped)),
        ] {
            check(Phase::Lending, signals, expected);
        }
        for (signals, expected) in [
            (&[Signal::Done(Fetch)][..], Some(Landed)),
            (&[lent, Signal::Failed(Lend)], None),
            (&[Signal::Failed(Fetch)], Some(Failed)),
            (&[Signal::Lost], Some(Failed)),
            (&[Signal::Overdue], Some(Failed)),
            (&[Signal::Unwanted], Some(Dropped)),
        ] {
            check(Phase::Computing, signals, expected);
        }
    }
}
