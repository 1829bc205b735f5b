//! Which turn is due when: sessions start as told, a turn follows the end of what it waits for plus its gap.
//!
//! One state machine for the simulator and for the live replay, so that both send the same turns in the same causal
//! order. It is told the time and when a turn has ended, and knows neither prompts nor answers. The seed orders the
//! sessions and draws their starts; it never touches recorded lengths or gaps.

mod selection;

use crate::draw::{exponential, shuffle, unit};
use crate::trace::{Trace, TurnRef};
use homing_units::{Duration, Instant, Rng, rng_for};
pub use selection::LeftOut;
use selection::select;
use std::collections::{BTreeMap, BTreeSet};

/// How sessions start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start {
    /// At the trace's own times, divided by the time scale.
    Recorded,
    /// A Poisson process of so many sessions per second of the replay (the time scale does not change it).
    Rate(f64),
    /// Closed loop: at most so many sessions live at once; the next starts when one has ended.
    Concurrency(u32),
}

impl Start {
    /// As recorded where the trace has times, else four live sessions a worker.
    #[must_use]
    pub fn default_for(trace: &Trace, workers: u32) -> Self {
        const SESSIONS_PER_WORKER: u32 = 4;
        if trace.has_times() {
            return Self::Recorded;
        }
        Self::Concurrency(workers.max(1).saturating_mul(SESSIONS_PER_WORKER))
    }
}

/// What to replay, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayConfig {
    /// How sessions start.
    pub start: Start,
    /// Gaps, recorded starts and `start_spread` are divided by this. Positive; 1 is the truth.
    pub time_scale: f64,
    /// With [`Start::Concurrency`] the first sessions start at random within this time, not all at once.
    pub start_spread: Duration,
    /// Requests in flight at most; turns that are due wait, the one due first goes first.
    pub max_inflight: Option<u32>,
    /// Root turns of a session at most. The sub-agents of the turns that stay come along.
    pub max_turns: Option<u32>,
    /// Sessions at most: the first of the trace that are not left out, whatever the seed.
    pub sessions: Option<u32>,
    /// A session ends before its first prompt above so many tokens; one that begins above is left out.
    pub max_context: Option<u32>,
    /// Sessions start in the trace's order whatever the seed, as they do where one trace is run again and again.
    pub keep_order: bool,
    /// Orders the sessions (unless their starts are recorded or the order is kept) and draws their starts.
    pub seed: u64,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self {
            start: Start::Recorded,
            time_scale: 1.0,
            start_spread: Duration::from_secs(10),
            max_inflight: None,
            max_turns: None,
            sessions: None,
            max_context: None,
            keep_order: false,
            seed: 1,
        }
    }
}

/// Why a trace cannot be replayed as asked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReplayError {
    /// The time scale is no positive number.
    #[error("time scale `{0}`, expected a number above 0")]
    TimeScale(f64),
    /// The rate is no positive number.
    #[error("rate `{0}`, expected sessions per second above 0")]
    Rate(f64),
    /// A limit is 0.
    #[error("{0} `0`, expected at least 1")]
    Zero(&'static str),
    /// Recorded starts were asked for, and the trace has none.
    #[error("trace `{0}` has no start times, expected a rate or a number of live sessions")]
    NoTimes(String),
    /// The largest context leaves out every session.
    #[error(
        "a largest context of `{limit}` tokens leaves nothing to replay, expected at least `{least}`: the shortest first prompt"
    )]
    Nothing {
        /// The largest context.
        limit: u32,
        /// Tokens of the shortest prompt with which a session begins.
        least: u32,
    },
}

/// A replay under way.
///
/// Drive it like the cores: after every [`Replay::ended`] and whenever [`Replay::next_due`] is reached, call
/// [`Replay::poll_due`] until it returns `None`, send what it gave, then ask [`Replay::next_due`] again; stop when
/// [`Replay::done`].
#[derive(Clone, Debug)]
pub struct Replay {
    sessions: Vec<Live>,
    /// Where in `sessions` a session of the trace is.
    positions: BTreeMap<u32, u32>,
    /// Turns whose predecessors have ended: when they are due, and which.
    due: BTreeSet<(Instant, Place)>,
    /// The first session that waits for another to end.
    next_session: usize,
    in_flight: u32,
    max_inflight: u32,
    turns: u64,
    turns_ended: u64,
    live: u32,
    left_out: LeftOut,
}

/// Position of a session in the replay's order, index of a turn in the session.
type Place = (u32, u32);

/// A session of the replay.
#[derive(Clone, Debug)]
struct Live {
    /// Its index in the trace.
    session: u32,
    turns: Vec<Progress>,
    /// Turns that have not ended.
    left: u32,
}

/// How far a turn is.
#[derive(Clone, Debug)]
struct Progress {
    /// Predecessors that have not ended.
    waits_for: u32,
    /// Turns that wait for this one.
    followers: Vec<u32>,
    /// The gap, divided by the time scale.
    gap: Duration,
    in_flight: bool,
}

impl Replay {
    /// A replay of `trace` that starts at [`Instant::ZERO`]. It keeps no reference to the trace.
    ///
    /// # Errors
    /// If a figure of `config` makes no sense, or recorded starts are asked for and the trace has none.
    ///
    /// # Panics
    /// If a turn of the trace waits for a turn that does not come before it.
    pub fn new(trace: &Trace, config: &ReplayConfig) -> Result<Self, ReplayError> {
        check(trace, config)?;
        let (mut selected, left_out) = select(trace, config);
        if let (true, Some(limit)) = (selected.is_empty(), config.max_context) {
            let firsts = trace.sessions.iter().filter_map(|session| session.turns.first());
            let least = firsts.map(|turn| turn.prompt_tokens).min().unwrap_or(0);
            return Err(ReplayError::Nothing { limit, least });
        }
        let mut rng = rng_for(config.seed, "replay");
        if config.start != Start::Recorded && !config.keep_order {
            shuffle(&mut selected, &mut rng);
        }
        let sessions: Vec<Live> = selected
            .iter()
            .map(|selected| Live::new(trace, selected.session, selected.turns, config.time_scale))
            .collect();
        let position = |(place, live): (usize, &Live)| (live.session, place as u32);
        let mut replay = Self {
            positions: sessions.iter().enumerate().map(position).collect(),
            turns: sessions.iter().map(|live| live.turns.len() as u64).sum(),
            sessions,
            due: BTreeSet::new(),
            next_session: 0,
            in_flight: 0,
            max_inflight: config.max_inflight.unwrap_or(u32::MAX),
            turns_ended: 0,
            live: 0,
            left_out,
        };
        for start in replay.first_starts(trace, config, &mut rng) {
            replay.start_next(start);
        }
        Ok(replay)
    }

    /// A turn that is due and not yet given, the one due first; `None` when there is none or the limit on requests in
    /// flight is reached. The turn counts as in flight from now on.
    pub fn poll_due(&mut self, now: Instant) -> Option<TurnRef> {
        let &(due, place) = self.due.first()?;
        if due > now || self.in_flight >= self.max_inflight {
            return None;
        }
        self.due.pop_first();
        self.in_flight += 1;
        let live = &mut self.sessions[place.0 as usize];
        live.turns[place.1 as usize].in_flight = true;
        Some(TurnRef {
            session: live.session,
            turn: place.1,
        })
    }

    /// When the next turn is due (it may be in the past); `None` when nothing is due before some turn has ended.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        if self.in_flight >= self.max_inflight {
            return None;
        }
        self.due.first().map(|&(due, _)| due)
    }

    /// A turn has ended. One that failed has ended too: its session goes on, as an agent does that was told of an error.
    ///
    /// # Panics
    /// If the turn is not in flight.
    pub fn ended(&mut self, now: Instant, turn: TurnRef) {
        let position = *self
            .positions
            .get(&turn.session)
            .expect("the session of a turn that was given is replayed");
        let live = &mut self.sessions[position as usize];
        let progress = &mut live.turns[turn.turn as usize];
        assert!(progress.in_flight, "turn {turn:?} ended and was not in flight");
        progress.in_flight = false;
        for follower in std::mem::take(&mut progress.followers) {
            let next = &mut live.turns[follower as usize];
            next.waits_for -= 1;
            if next.waits_for == 0 {
                self.due.insert((now + next.gap, (position, follower)));
            }
        }
        live.left -= 1;
        self.in_flight -= 1;
        self.turns_ended += 1;
        if live.left == 0 {
            self.live -= 1;
            self.start_next(now);
        }
    }

    /// Whether every turn has ended.
    #[must_use]
    pub const fn done(&self) -> bool {
        self.turns_ended == self.turns
    }

    /// What the configuration left out of the trace.
    #[must_use]
    pub const fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// Sessions that are replayed.
    #[must_use]
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// Turns that are replayed.
    #[must_use]
    pub const fn turn_count(&self) -> u64 {
        self.turns
    }

    /// Turns that have ended so far, for a progress bar.
    #[must_use]
    pub const fn turns_ended(&self) -> u64 {
        self.turns_ended
    }

    /// Requests in flight.
    #[must_use]
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Sessions that were started (or have their start set) and have not ended.
    #[must_use]
    pub const fn live_sessions(&self) -> u32 {
        self.live
    }

    /// When the sessions start that do not wait for others to end, in the replay's order.
    fn first_starts(&self, trace: &Trace, config: &ReplayConfig, rng: &mut Rng) -> Vec<Instant> {
        match config.start {
            Start::Recorded => self
                .sessions
                .iter()
                .map(|live| trace.sessions[live.session as usize].start.unwrap_or_default())
                .map(|start| Instant::ZERO + scaled(start, config.time_scale))
                .collect(),
            Start::Rate(rate) => {
                let mut at = Instant::ZERO;
                let mut next = || {
                    at += from_secs(exponential(unit(rng), rate));
                    at
                };
                self.sessions.iter().map(|_| next()).collect()
            }
            Start::Concurrency(live) => {
                let spread = scaled(config.start_spread, config.time_scale).as_secs_f64();
                let first = self.sessions.iter().take(live as usize);
                first.map(|_| Instant::ZERO + from_secs(spread * unit(rng))).collect()
            }
        }
    }

    /// Starts the next session that waits, if there is one.
    fn start_next(&mut self, start: Instant) {
        let Some(live) = self.sessions.get(self.next_session) else {
            return;
        };
        for (turn, progress) in live
            .turns
            .iter()
            .enumerate()
            .filter(|(_, progress)| progress.waits_for == 0)
        {
            self.due
                .insert((start + progress.gap, (self.next_session as u32, turn as u32)));
        }
        self.live += 1;
        self.next_session += 1;
    }
}

impl Live {
    /// The first `turns` turns of a session.
    fn new(trace: &Trace, session: u32, turns: usize, time_scale: f64) -> Self {
        let recorded = &trace.sessions[session as usize].turns[..turns];
        let mut progress: Vec<Progress> = Vec::with_capacity(turns);
        for (index, turn) in recorded.iter().enumerate() {
            for &before in &turn.after {
                assert!((before as usize) < index, "a turn waits only for turns before it");
                progress[before as usize].followers.push(index as u32);
            }
            let waits_for = u32::try_from(turn.after.len()).expect("fewer predecessors than turns");
            let gap = scaled(turn.gap, time_scale);
            progress.push(Progress {
                waits_for,
                followers: Vec::new(),
                gap,
                in_flight: false,
            });
        }
        Self {
            session,
            left: u32::try_from(turns).expect("a session has fewer than 2^32 turns"),
            turns: progress,
        }
    }
}

fn check(trace: &Trace, config: &ReplayConfig) -> Result<(), ReplayError> {
    if !(config.time_scale.is_finite() && config.time_scale > 0.0) {
        return Err(ReplayError::TimeScale(config.time_scale));
    }
    let limits = [
        ("requests in flight", config.max_inflight),
        ("turns a session", config.max_turns),
        ("sessions", config.sessions),
        ("context", config.max_context),
    ];
    if let Some((name, _)) = limits.into_iter().find(|(_, limit)| *limit == Some(0)) {
        return Err(ReplayError::Zero(name));
    }
    match config.start {
        Start::Recorded if !trace.has_times() => Err(ReplayError::NoTimes(trace.name.clone())),
        Start::Rate(rate) if !(rate.is_finite() && rate > 0.0) => Err(ReplayError::Rate(rate)),
        Start::Concurrency(0) => Err(ReplayError::Zero("live sessions")),
        Start::Recorded | Start::Rate(_) | Start::Concurrency(_) => Ok(()),
    }
}

/// A duration divided by the time scale.
fn scaled(duration: Duration, time_scale: f64) -> Duration {
    from_secs(duration.as_secs_f64() / time_scale)
}

/// Seconds as a duration; what is above the longest duration counts as that.
fn from_secs(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
