//! What is learnt of each kind of client: whether and when its sessions come back, how many turns they have still, and how long
//! answers are.
//!
//! A driver says of which kind a turn's client is, as far as it knows: one coding agent or another, a sub-agent, a chat. The core knows
//! no names, only [`KINDS`] numbers; what is beyond them is of the first kind, like all of whom nothing is said. Of each kind the same
//! is learnt as of all together, and the latter counts in it like [`LIKE_ALL`] sessions: a kind that is seldom seen behaves like all
//! until it has shown itself, and one that is not is never worse off for having a name.

use crate::event::ClientKind;
use crate::router::ClientView;
use homing_kv::returns::{Hazards, LifeTable};
use homing_units::Duration;

/// Kinds that are told apart.
const KINDS: usize = 16;

/// What is taken to be so before anything was seen counts like so many sessions.
const BEFORE: f64 = 8.0;

/// What all kinds do counts like so many sessions of each.
const LIKE_ALL: f64 = 16.0;

/// Gaps without which no session is given up before the longest time.
const ENOUGH: u32 = 64;

/// Answers this many turns old count a third.
const OUTPUT_MEMORY: f64 = 256.0;

/// Output tokens that are expected of a turn before any has ended.
const FIRST_OUTPUT_TOKENS: f64 = 512.0;

/// All clients.
#[derive(Clone, Debug)]
pub(crate) struct Clients {
    all: Client,
    kinds: [Client; KINDS],
    /// No session is expected back later than so long after its turn.
    longest: Duration,
}

/// One kind of client, or all.
#[derive(Clone, Debug, Default)]
struct Client {
    table: LifeTable,
    /// The mean of its answers' tokens, the old ones fading.
    output_tokens: f64,
    /// Turns that have ended.
    turns: u64,
}

impl Clients {
    /// `longest`: how long a session is expected back at most.
    pub(crate) fn new(longest: Duration) -> Self {
        Self {
            all: Client::default(),
            kinds: std::array::from_fn(|_| Client::default()),
            longest,
        }
    }

    /// A session of this kind has ended its turn.
    pub(crate) fn leaves(&mut self, kind: ClientKind) {
        self.both(kind, |client| client.table.leaves());
    }

    /// One has been away for longer than this bin.
    pub(crate) fn passes(&mut self, kind: ClientKind, bin: usize) {
        self.both(kind, |client| client.table.passes(bin));
    }

    /// One has come back in this bin.
    pub(crate) fn returns(&mut self, kind: ClientKind, bin: usize) {
        self.both(kind, |client| client.table.returns(bin));
    }

    /// One was forgotten in this bin.
    pub(crate) fn is_forgotten(&mut self, kind: ClientKind, bin: usize) {
        self.both(kind, |client| client.table.is_forgotten(bin));
    }

    /// An answer to one had so many tokens.
    pub(crate) fn answers(&mut self, kind: ClientKind, tokens: u32) {
        self.both(kind, |client| client.answers(tokens));
    }

    /// Whether and when sessions of this kind come back.
    pub(crate) fn hazards(&self, kind: ClientKind) -> Hazards {
        self.client(kind).table.hazards(&self.hazards_of_all(), LIKE_ALL)
    }

    /// The same of all sessions.
    pub(crate) fn hazards_of_all(&self) -> Hazards {
        self.all.table.hazards(&Hazards::before(), BEFORE)
    }

    /// The share of those that comes back in time, and how long that is on average, in seconds.
    pub(crate) fn returns_of_all(&self) -> (f64, f64) {
        let hazards = self.hazards_of_all();
        (
            hazards.come(0, self.longest),
            hazards.gap_s(self.longest).unwrap_or(0.0),
        )
    }

    /// How long sessions of this kind are expected back.
    pub(crate) fn window(&self, hazards: &Hazards) -> Duration {
        if self.all.table.gaps() < ENOUGH {
            self.longest
        } else {
            hazards.window(self.longest)
        }
    }

    /// Sessions that are away.
    pub(crate) fn away(&self) -> u32 {
        self.all.table.away()
    }

    /// Tokens that are expected of the answer to a turn of this kind.
    pub(crate) fn output_tokens(&self, kind: ClientKind) -> f64 {
        let of_all = self.all.mean_output(FIRST_OUTPUT_TOKENS, BEFORE);
        self.client(kind).mean_output(of_all, LIKE_ALL)
    }

    /// What is expected of each kind of which a turn has ended.
    pub(crate) fn view(&self) -> impl Iterator<Item = ClientView> {
        let known = (0..).zip(&self.kinds).filter(|(_, client)| client.turns > 0);
        known.map(|(kind, client)| {
            let kind = ClientKind(kind);
            let hazards = self.hazards(kind);
            ClientView {
                kind,
                turns: client.turns,
                away: client.table.away(),
                return_share: hazards.come(0, Duration::MAX),
                further_turns: hazards.turns(),
                gap_s: hazards.gap_s(self.longest),
                output_tokens: self.output_tokens(kind),
            }
        })
    }

    fn client(&self, kind: ClientKind) -> &Client {
        self.kinds.get(usize::from(kind.0)).unwrap_or(&self.kinds[0])
    }

    fn both(&mut self, kind: ClientKind, change: impl Fn(&mut Client)) {
        let kind = Some(usize::from(kind.0)).filter(|kind| *kind < KINDS).unwrap_or(0);
        change(&mut self.kinds[kind]);
        change(&mut self.all);
    }
}

impl Client {
    fn answers(&mut self, tokens: u32) {
        self.turns += 1;
        self.output_tokens += (f64::from(tokens) - self.output_tokens) / (self.turns as f64).min(OUTPUT_MEMORY);
    }

    /// The mean of its answers, where `before` counts like so many of them.
    fn mean_output(&self, before: f64, weight: f64) -> f64 {
        let turns = self.turns as f64;
        (self.output_tokens * turns + before * weight) / (turns + weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_kv::returns::bin_of;
    use homing_units::rng_for;
    use rand::RngExt as _;

    const LONGEST: Duration = Duration::from_secs(300);
    const CHAT: ClientKind = ClientKind(1);
    const AGENT: ClientKind = ClientKind(2);

    /// What happened to a session after a turn: it came back after so long, which nobody may have seen yet, or it is gone.
    struct Away {
        kind: ClientKind,
        left_s: f64,
        gap_s: Option<f64>,
    }

    /// Sessions that begin evenly over this time: chats that go on with a share of 2 in 3, 20 s apart, so that a turn has 2 others after
    /// it; agents that go on 39 times in 40, with long-tailed gaps, 5 s in the median.
    fn population(sessions: u32, begin_within_s: f64, seed: u64) -> Vec<Away> {
        let mut rng = rng_for(seed, "population");
        let mut all = Vec::new();
        for session in 0..sessions {
            let kind = if session % 4 == 0 { AGENT } else { CHAT };
            let mut left_s = f64::from(session) / f64::from(sessions) * begin_within_s;
            loop {
                let uniform: f64 = rng.random();
                let goes_on = rng.random::<f64>() < if kind == CHAT { 2.0 / 3.0 } else { 39.0 / 40.0 };
                // A log-logistic tail: one gap in ten is longer than five times the median, one in a hundred than 25 times.
                let gap_s = if kind == CHAT {
                    -20.0 * libm::log(1.0 - uniform)
                } else {
                    5.0 * libm::pow(uniform / (1.0 - uniform), 0.7)
                };
                let gap_s = goes_on.then_some(gap_s);
                all.push(Away { kind, left_s, gap_s });
                let Some(gap_s) = gap_s else { break };
                left_s += gap_s;
            }
        }
        all
    }

    /// What is learnt of it by somebody who looks until then.
    fn learnt(population: &[Away], until_s: f64) -> Clients {
        let mut clients = Clients::new(LONGEST);
        for away in population.iter().filter(|away| away.left_s < until_s) {
            let seen_s = until_s - away.left_s;
            let returned = away.gap_s.filter(|gap| *gap < seen_s);
            let bin = bin_of(Duration::from_secs_f64(returned.unwrap_or(seen_s)));
            clients.leaves(away.kind);
            (0..bin).for_each(|passed| clients.passes(away.kind, passed));
            if returned.is_some() {
                clients.returns(away.kind, bin);
            }
        }
        clients
    }

    /// What was taken for further turns before: gaps that ended, by sessions that were away for 300 s, all kinds alike, and 8 that
    /// had 5 turns each before any was seen.
    fn counted(population: &[Away], until_s: f64) -> f64 {
        let seen = || population.iter().filter(|away| away.left_s < until_s);
        let came = seen()
            .filter(|away| away.gap_s.is_some_and(|gap| away.left_s + gap < until_s))
            .count();
        let given_up = |away: &&Away| away.gap_s.is_none_or(|gap| gap > 300.0) && away.left_s + 300.0 < until_s;
        let gone = seen().filter(given_up).count();
        (came as f64 + 40.0) / (gone as f64 + 8.0)
    }

    /// Turns that its sessions of this kind had after one of their turns: gaps by sessions, all of which have ended.
    fn truth(population: &[Away], kind: ClientKind) -> f64 {
        let of_kind = population.iter().filter(|away| away.kind == kind);
        let (came, gone): (Vec<_>, Vec<_>) = of_kind.partition(|away| away.gap_s.is_some());
        came.len() as f64 / gone.len() as f64
    }

    fn is_within(found: f64, share: f64, expected: f64) -> bool {
        (found / expected - 1.0).abs() <= share
    }

    #[test]
    fn two_kinds_are_learnt_while_most_sessions_are_still_away() {
        for seed in 0..8 {
            let population = population(400, 240.0, seed);
            // Of the few agents that are gone, whoever waits for 300 s has seen none: the old count has chats and agents go on for ever.
            let clients = learnt(&population, 240.0);
            let (chat, agent) = (clients.hazards(CHAT).turns(), clients.hazards(AGENT).turns());
            assert!(
                is_within(chat, 0.25, 2.0),
                "seed {seed}: chats have {chat} further turns"
            );
            assert!(
                is_within(agent, 0.5, 39.0),
                "seed {seed}: agents have {agent} further turns"
            );
            let old = counted(&population, 240.0);
            assert!(old > 2.0 * 39.0, "seed {seed}: the old count was {old} for both");
        }
    }

    #[test]
    fn given_time_they_are_learnt_well() {
        for seed in 0..8 {
            let population = population(1_600, 3_600.0, seed);
            let clients = learnt(&population, 7_200.0);
            // What is remembered is some 3,000 gaps, of which 75 agents have no more than one end each.
            for (kind, share) in [(CHAT, 0.1), (AGENT, 0.3)] {
                let (found, truth) = (clients.hazards(kind).turns(), truth(&population, kind));
                assert!(
                    is_within(found, share, truth),
                    "seed {seed}: {kind:?} has {truth} further turns, found {found}"
                );
            }
            let old = counted(&population, 7_200.0);
            assert!(
                !is_within(old, 0.5, 2.0) && !is_within(old, 0.5, 39.0),
                "seed {seed}: {old} for both"
            );
            // Half of the agents that come back do so within 5 s, and half of the chats within 14.
            let median = |kind: ClientKind, median_s: u64| {
                let hazards = clients.hazards(kind);
                hazards.come(0, Duration::from_secs(median_s)) / hazards.come(0, Duration::MAX)
            };
            assert!(
                is_within(median(CHAT, 14), 0.12, 0.5),
                "seed {seed}: {}",
                median(CHAT, 14)
            );
            assert!(
                is_within(median(AGENT, 5), 0.12, 0.5),
                "seed {seed}: {}",
                median(AGENT, 5)
            );
        }
    }

    #[test]
    fn a_rare_kind_behaves_like_all_until_it_has_shown_itself() {
        let mut clients = learnt(&population(400, 3_600.0, 1), 3_600.0);
        let rare = ClientKind(7);
        let of_all = clients.hazards_of_all().turns();
        assert!(is_within(clients.hazards(rare).turns(), 1e-9, of_all));
        let leave_for_good = |clients: &mut Clients, times: u32| {
            for _ in 0..times {
                clients.leaves(rare);
                (0..20).for_each(|bin| clients.passes(rare, bin));
                clients.is_forgotten(rare, 20);
            }
        };
        leave_for_good(&mut clients, 1);
        assert!(
            is_within(clients.hazards(rare).turns(), 0.5, of_all),
            "{}",
            clients.hazards(rare).turns()
        );
        leave_for_good(&mut clients, 160);
        assert!(clients.hazards(rare).turns() < 0.3, "{}", clients.hazards(rare).turns());
    }

    #[test]
    fn answers_are_learnt_of_each_kind() {
        let mut clients = Clients::new(LONGEST);
        assert_eq!(clients.output_tokens(CHAT), 512.0);
        for _ in 0..200 {
            clients.answers(CHAT, 1_000);
            clients.answers(AGENT, 100);
        }
        assert!(is_within(clients.output_tokens(CHAT), 0.1, 1_000.0), "{clients:?}");
        assert!(is_within(clients.output_tokens(AGENT), 0.4, 100.0), "{clients:?}");
        assert!(
            is_within(clients.output_tokens(ClientKind(5)), 0.1, 550.0),
            "{clients:?}"
        );
        // What is beyond those that are told apart is of the first kind.
        clients.answers(ClientKind(200), 50);
        let kinds: Vec<_> = clients.view().map(|view| (view.kind, view.turns)).collect();
        assert_eq!(kinds, [(ClientKind(0), 1), (CHAT, 200), (AGENT, 200)]);
    }
}
