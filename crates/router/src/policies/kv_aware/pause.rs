//! The pause that a decode worker recommends to a turn before it is sent: `recommended_pause_ms`, two versions of it.
//!
//! ```text
//! report  retracted > 0: 1500 ms;  usage_after >= 0.90: max(200, min(2000, overshoot * 5)) ms;
//!         transfer queue >= 8: min(2000, 100 * depth) ms
//! drain   lacking = in flight + this turn - rho * pool, in tokens;  drained a second = context that decodes / life of an answer
//!         max(lacking / drained, a pull for each seed that is over the bound), and again until nothing lacks
//! ```
//!
//! The first is the report's. It knows how full a pool is and not how soon it will be less so, it counts KV of idle sessions that would
//! be trimmed for whoever comes, it forgets what was sent and has not arrived, and whoever has paused once is sent whatever
//! the worker says then. The second asks how long until there is room, of what is booked, and closes the loop: a turn is looked at again
//! after its pause, and goes when it fits or when it has waited [`PATIENCE`]. The drill `no-backpressure` compares the two.
//!
//! Derived: answers end at random, so that of n that decode one ends after a nth of the mean life of an answer, and frees its context;
//! so what decodes drains at its context over that life.

use crate::policies::{TurnView, WorkerView};
use homing_units::Duration;

/// A turn that has waited so long for pauses to end is sent all the same.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// The shortest pause: less is not worth looking again.
const PAUSE_MIN_S: f64 = 0.05;

/// Seeds that may be on their way to one worker before the next one waits for the first of them: the report's bound of its queue.
const SEEDS_AHEAD: u32 = 8;

/// Which hints are heeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backpressure {
    /// None.
    Off,
    /// The report's formula.
    Report,
    /// Until there is room.
    Drain,
}

impl Backpressure {
    /// Its words in a policy's text.
    pub(super) const WORDS: [&'static str; 3] = ["off", "on", "drain"];

    /// What such a word means; another is none.
    pub(super) fn of(word: &str) -> Self {
        match word {
            "on" => Self::Report,
            "drain" => Self::Drain,
            _ => Self::Off,
        }
    }
}

/// The report's hint (its §3), of a worker whose pool would be in use to this share.
pub(super) fn report(decode: &WorkerView, usage_after: f64) -> Duration {
    let milliseconds = if decode.retracted > 0 {
        1_500
    } else if usage_after >= 0.90 {
        let overshoot = (usage_after - 0.90) * 1_000.0;
        ((overshoot * 5.0).round() as u64).clamp(200, 2_000)
    } else if decode.transfer_queue >= 8 {
        (u64::from(decode.transfer_queue) * 100).min(2_000)
    } else {
        0
    };
    Duration::from_millis(milliseconds)
}

/// How long until this worker has room for the turn, `max` at most; nothing where it has.
pub(super) fn drain(decode: &WorkerView, turn: &TurnView, rho: f64, max: Duration) -> Duration {
    let (account, speed) = (&decode.account, &decode.speed);
    if account.requests == 0 {
        // Nobody is there whose end could be waited for.
        return Duration::ZERO;
    }
    let output = f64::from(turn.expected_output_tokens.max(1));
    let wanted = account.reserved_tokens as f64 + f64::from(turn.prompt_tokens) + output;
    let lacking = wanted - rho * decode.kv_tokens as f64;
    let over = (account.seeds + 1).saturating_sub(SEEDS_AHEAD);
    if lacking <= 0.0 && over == 0 {
        return Duration::ZERO;
    }
    let (batch, context) = (f64::from(account.decodes), account.decode_tokens as f64);
    let life_s = output * speed.decode_s(batch, context);
    // Where nothing decodes yet, what lacks does not drain before something does.
    let room_s = if context > 0.0 {
        lacking.max(0.0) * life_s / context
    } else {
        max.as_secs_f64()
    };
    let pulls_s = f64::from(over) * (speed.setup_s + f64::from(turn.prompt_tokens) * speed.moved_token_s);
    Duration::from_secs_f64(room_s.max(pulls_s).clamp(PAUSE_MIN_S, PATIENCE.as_secs_f64())).min(max)
}
