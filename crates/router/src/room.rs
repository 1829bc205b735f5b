//! What a worker says of its own room, how long that counts, and what it keeps away.
//!
//! The ledger knows what the router sent to a worker. It knows nothing of what others send there, and reckons with outputs of
//! the usual length. A worker that can be asked (`WorkerInfo` of the shell says so, the core need not know) answers from a
//! snapshot: this is the part of admission that is a question and books nothing. It keeps work away and never draws any; what
//! it denies waits in the router's queue, and is looked at again with the queue's own jitter and when the worker has room.
//!
//! No deadlock: a pause is short and counts once, and the bound on tokens does not hold for a worker that has nothing of ours.

use crate::admission::{Account, Denied};
use crate::event::RoomReport;
use homing_units::{Duration, Instant};

/// An answer counts for so long: three of the gateway's polls. A worker that says nothing for longer is judged by the ledger alone.
const FRESH_FOR: Duration = Duration::from_secs(3);
/// The longest pause that is honoured.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// A worker's last answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    until: Instant,
    away_until: Instant,
    spare_tokens: u64,
    /// What the ledger had reserved there when it came.
    reserved_tokens: u64,
}

impl Room {
    /// An answer that has just come, while the ledger says `account` of the worker.
    pub(crate) fn told(now: Instant, report: &RoomReport, account: &Account) -> Self {
        Self {
            until: now + FRESH_FOR,
            away_until: now + report.pause.min(PAUSE_MAX),
            spare_tokens: report.spare_tokens,
            reserved_tokens: account.reserved_tokens,
        }
    }

    /// Whether it keeps a request away that takes `whole` pool tokens, or `shared` beside what runs there, which is looked at only
    /// where it matters.
    pub(crate) fn denies(
        &self,
        now: Instant,
        account: &Account,
        whole: u64,
        shared: impl FnOnce() -> u64,
    ) -> Option<Denied> {
        if now < self.away_until {
            return Some(Denied::SaysFull);
        }
        if now >= self.until || account.requests == 0 {
            return None;
        }
        let since = account.reserved_tokens.saturating_sub(self.reserved_tokens);
        let left = self.spare_tokens.saturating_sub(since);
        (whole > left && shared() > left).then_some(Denied::SaysFull)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::{BootEpoch, WorkerId};

    fn account(requests: u32, reserved_tokens: u64) -> Account {
        Account {
            requests,
            reserved_tokens,
            ..Account::default()
        }
    }

    #[test]
    fn an_answer_counts_for_a_while_and_with_what_was_sent_since() {
        let report = |spare_tokens, pause_ms| RoomReport {
            worker: WorkerId(0),
            epoch: BootEpoch(1),
            spare_tokens,
            pause: Duration::from_millis(pause_ms),
        };
        let check = |report: RoomReport, after_ms, now: Account, expected: bool| {
            let room = Room::told(Instant::ZERO, &report, &account(1, 500));
            let at = Instant::ZERO + Duration::from_millis(after_ms);
            let denied = room.denies(at, &now, 400, || 300);
            assert_eq!(
                denied.is_some(),
                expected,
                "{report:?} after {after_ms} ms with {now:?}"
            );
        };
        check(report(300, 0), 0, account(1, 500), false);
        check(report(299, 0), 0, account(1, 500), true);
        // Nothing of ours is there: it is tried, because nobody would tell when to.
        check(report(0, 0), 0, account(0, 0), false);
        // What was booked since has taken some of it, what has ended gave none back that it told of.
        check(report(400, 0), 0, account(2, 601), true);
        check(report(400, 0), 0, account(2, 600), false);
        check(report(300, 0), 0, account(1, 0), false);
        // It is old.
        check(report(0, 0), 3_000, account(1, 500), false);
        // A pause holds whatever the room, and not for ever.
        check(report(9_999, 40), 39, account(0, 0), true);
        check(report(9_999, 40), 40, account(0, 0), false);
        check(report(9_999, 60_000), 2_000, account(0, 0), false);
    }
}
