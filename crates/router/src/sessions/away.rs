//! Sessions between their turns: what is expected of one that is away changes as time goes by.
//!
//! How long it has been away goes by the bins of what is learnt (`returns` of `kv`). At the end of each, and of the time that any
//! session counts as live, it is looked at again: whether it is expected back at all, and with which share of certainty. So the demand
//! of those who are away is a sum that is kept, and a look at it costs nothing.

use super::{Session, Sessions};
use homing_kv::returns::{bin_end, bin_of};
use homing_units::{Duration, Instant, SessionId};

/// A share of 1, as sessions have it: whole numbers add up and subtract without a rest.
const ALL: u32 = 1_024;

/// What is expected of a session that is away.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Away {
    /// How long it has been away: a bin.
    pub(super) bin: usize,
    /// When that is looked at again; nothing is told of it while a turn is in flight.
    pub(super) changes: Instant,
    /// The share with which it comes back in time, of [`ALL`].
    share: u32,
}

impl Session {
    /// Tokens that it is expected to want, while it is away, of what no other family shows.
    pub(super) fn expected_tokens(&self) -> u64 {
        self.own_tokens() * u64::from(self.away.share) / u64::from(ALL)
    }
}

impl Sessions {
    /// A session has no turn in flight any more.
    pub(super) fn leaves(&mut self, id: SessionId, now: Instant) {
        self.idle.insert((now, id));
        self.clients.leaves(self.sessions[&id].kind);
        self.expect(id, 0, Duration::ZERO);
    }

    /// A turn of a session begins; it may be its first one, or have others in flight.
    pub(super) fn comes_back(&mut self, id: SessionId, now: Instant) {
        let session = &self.sessions[&id];
        let (kind, used, changes) = (session.kind, session.last_used, session.away.changes);
        if !self.idle.remove(&(used, id)) {
            return;
        }
        self.changing.remove(&(changes, id));
        let bin = self.moves_to(id, bin_of(now.saturating_since(used)));
        self.clients.returns(kind, bin);
    }

    /// Looks again at sessions of which something else is expected now.
    pub(crate) fn cool(&mut self, now: Instant) {
        while let Some((at, id)) = self.changing.first().copied()
            && at <= now
        {
            self.changing.pop_first();
            let away = at.saturating_since(self.sessions[&id].last_used);
            let bin = self.moves_to(id, bin_of(away));
            self.expect(id, bin, away);
        }
    }

    /// It has been away for so long, in bins.
    fn moves_to(&mut self, id: SessionId, bin: usize) -> usize {
        let session = self.sessions.get_mut(&id).expect("whoever is away is remembered");
        for passed in session.away.bin..bin {
            self.clients.passes(session.kind, passed);
        }
        session.away.bin = bin;
        bin
    }

    /// What is expected of one that has been away for so long, which is this bin.
    fn expect(&mut self, id: SessionId, bin: usize, away: Duration) {
        let hazards = self.clients.hazards(self.sessions[&id].kind);
        let longest = self.limits.live;
        let live = away < self.clients.window(&hazards);
        let share = (hazards.come(bin, longest) * f64::from(ALL)) as u32;
        let ends = bin_end(bin);
        let next = Some(longest).filter(|longest| away < *longest && ends.is_none_or(|end| *longest < end));
        let changes = next.or(ends).map(|after| self.sessions[&id].last_used + after);
        if let Some(changes) = changes {
            self.changing.insert((changes, id));
        }
        self.change(id, |session| {
            session.live = live;
            session.away = Away {
                bin,
                changes: changes.unwrap_or(Instant::ZERO),
                share,
            };
        });
    }
}
