//! What the terms need to know of the fleet for one turn, worked out once for each worker.

use super::HomingConfig;
use crate::policies::{Board, TurnView, WorkerView};
use crate::speed::{Beside, Speed, pairs};
use homing_units::WorkerId;

/// A mean gap is taken to be so long at least, in seconds: sessions that never pause have one turn in flight all the time.
const LEAST_GAP_S: f64 = 0.1;

/// Of what is pending so much is left at least, however long the first of it has taken: the estimate errs, and others wait behind.
const LEAST_LEFT: f64 = 0.1;

/// One turn before a fleet.
#[derive(Debug)]
pub(super) struct Estimate<'a> {
    pub(super) config: &'a HomingConfig,
    pub(super) board: &'a Board,
    pub(super) turn: &'a TurnView,
    /// One for each worker of the board, in its order.
    pub(super) places: Vec<Place<'a>>,
    /// Turns that come in a second of a session that lives somewhere.
    pub(super) arrivals: f64,
}

/// A worker as a place for the turn.
#[derive(Debug)]
pub(super) struct Place<'a> {
    pub(super) worker: &'a WorkerView,
    pub(super) speed: Speed,
    /// Requests that decode there or will before this one does.
    pub(super) batch: f64,
    /// They, with the tokens of their contexts.
    pub(super) beside: Beside,
    /// A step in which the turn decodes with them, in seconds.
    pub(super) joined_s: f64,
    /// Requests that decode there now.
    decoding: Beside,
    /// Seconds until the prefill that is pending there is done.
    pub(super) queue_s: f64,
    /// Requests that decode there, on average, while a session lives there, without its own.
    pub(super) company: f64,
    /// Turns that come there in a second, of the sessions that live there.
    pub(super) arrivals: f64,
    /// How many times its pool is wanted by live sessions if this one lives there, what all share counted once.
    pub(super) demand: f64,
}

impl<'a> Estimate<'a> {
    pub(super) fn new(config: &'a HomingConfig, board: &'a Board, turn: &'a TurnView, busy_share: f64) -> Self {
        let place = |worker: &'a WorkerView| Place::new(worker, config.speed.unwrap_or(worker.speed), turn, busy_share);
        let places = board.workers.iter().map(place);
        let arrivals = (1.0 - busy_share) * turn.return_share / turn.expected_gap_s.max(LEAST_GAP_S);
        Self {
            config,
            board,
            turn,
            places: places.collect(),
            arrivals,
        }
    }

    /// The same with each worker as busy as it is on average, for a turn that is yet to come.
    pub(super) fn on_average(mut self) -> Self {
        for place in &mut self.places {
            place.is_joined(
                place.company,
                place.company * f64::from(self.turn.prompt_tokens),
                self.turn,
            );
            place.queue_s = 0.0;
        }
        self
    }

    /// A worker as a place, by its id.
    pub(super) fn place(&self, id: WorkerId) -> Option<&Place<'a>> {
        let index = self.places.binary_search_by_key(&id, |place| place.worker.id).ok()?;
        self.places.get(index)
    }

    /// Tokens of the prompt that the place lacks, as far as that counts. Boilerplate alone draws no new session to a place: whoever has
    /// it first would get them all, and each place pays for it once.
    pub(super) fn lacks(&self, place: &Place<'_>) -> u32 {
        if self.turn.new_family {
            self.turn.prompt_tokens
        } else {
            place.worker.lacks(self.turn)
        }
    }

    /// Tokens of the answer to reckon with.
    pub(super) fn output(&self) -> f64 {
        f64::from(self.turn.expected_output_tokens.max(1))
    }
}

impl<'a> Place<'a> {
    fn new(worker: &'a WorkerView, speed: Speed, turn: &TurnView, busy_share: f64) -> Self {
        let account = &worker.account;
        let batch = f64::from(account.requests.saturating_sub(account.exports));
        let pending = (account.append_tokens + account.prefill_tokens) as f64;
        let decoding = speed.beside(f64::from(account.decodes), account.decode_tokens as f64);
        let pending_s = speed.prefill_s(pending, account.pending_pairs as f64 * 1e6, &decoding);
        let queue_s = (pending_s - worker.prefilling_s).max(pending_s * LEAST_LEFT);
        let wanted = worker.live_own_tokens + u64::from(turn.prompt_tokens) + u64::from(turn.expected_output_tokens);
        let mut place = Self {
            worker,
            speed,
            batch,
            beside: decoding,
            joined_s: 0.0,
            decoding,
            queue_s,
            company: busy_share * f64::from(worker.live_sessions),
            arrivals: (1.0 - busy_share) * f64::from(worker.live_sessions) * turn.return_share
                / turn.expected_gap_s.max(LEAST_GAP_S),
            demand: wanted as f64 / worker.kv_tokens.max(1) as f64,
        };
        place.is_joined(batch, account.reserved_tokens as f64, turn);
        place
    }

    /// So many requests decode there before the turn does, with so many tokens of context.
    fn is_joined(&mut self, batch: f64, context: f64, turn: &TurnView) {
        self.batch = batch;
        self.beside = self.speed.beside(batch, context);
        self.joined_s = self
            .speed
            .decode_s(batch + 1.0, context + f64::from(turn.prompt_tokens));
    }

    /// How long this place takes to prefill so many tokens at the prompt's end, once it begins.
    pub(super) fn prefill_s(&self, tokens: u32, prompt_tokens: u32) -> f64 {
        self.speed
            .prefill_s(f64::from(tokens), pairs(tokens, prompt_tokens), &self.decoding)
    }

    /// Tokens of the prompt that the place may prefill without those who decode there waiting longer than this for their next
    /// token: what one step takes within it, less what is pending there already. Where nobody decodes, nobody waits.
    pub(super) fn append_budget(&self, longest_s: f64, prompt_tokens: u32) -> f64 {
        let account = &self.worker.account;
        if account.decodes == 0 {
            return f64::INFINITY;
        }
        let (batch, context) = (f64::from(account.decodes), account.decode_tokens as f64);
        let tokens = self
            .speed
            .tokens_within(longest_s, f64::from(prompt_tokens), batch, context);
        (tokens - account.append_tokens as f64).max(0.0)
    }

    /// What that prefill costs each request that decodes beside it.
    pub(super) fn stall_s(&self, tokens: u32, prompt_tokens: u32) -> f64 {
        self.speed
            .stall_s(f64::from(tokens), pairs(tokens, prompt_tokens), &self.beside)
    }
}
