//! `homing`: every turn to the worker that holds its session's KV, when that is the cheapest plan. The planner.
//!
//! For each turn it enumerates who could serve it and how (`plans`), prices each plan in seconds (`cost`, one file a term), and
//! takes the least:
//!
//! ```text
//! first   until the first token: queue ahead, reload or transfer, prefill of what is lacking     terms/first.rs
//! own     generating the answer in the company that it joins                                    terms/own.rs
//! others  what those lose who decode beside it: slower steps, and the stall of its prefill       terms/others.rs
//! behind  what those lose who come there while it is prefilled                                   terms/behind.rs
//! evict   bringing back what it displaces                                                        terms/evict.rs
//! future  the same for the session's coming turns, if it lives there                             terms/future.rs
//! ```
//!
//! A greedy choice of the least sum of one's own time and the time that others lose is what minimises the mean of all. Weights
//! are 1; a term can be left out (`without=others`) to see what it is worth.
//!
//! A session without a home goes where the fewest live, of the plans whose costs nobody can tell apart (`alike`): forecasts err by more, and
//! who is idle now comes back.
//!
//! A session stays at its home unless another plan beats that by a margin: estimates err, and KV that moves costs whoever has
//! to move it back. A home that has no room for the cheapest plan there is waited for as long as any other plan would cost more,
//! one that ends at home too (rent or buy: at most twice the cost of the better choice in hindsight): a short tail waits for the long
//! ones before it rather than go over a prefill worker that is behind. Where KV moves, it moves (`migrate`): the home hands it over.
//!
//! Where pools are smaller than what live sessions need and nothing keeps what they evict, each turn would evict what the next one
//! needs. There, and where nobody has the time to prefill whole histories in each turn, a turn whose history is nowhere waits until some pool has room for it beside the sessions that are
//! expected back, for a bounded time (`pace`). So sessions take turns at the boundaries of
//! their tool calls instead of all being slow together.

mod cost;
mod errands;
mod estimate;
mod pace;
mod plans;
mod terms;

pub use cost::Terms;

use super::spec::Parameters;
use super::{Board, Choice, Considered, ErrandKinds, Habits, Order, Policy, PolicyError, TurnView, WorkerView};
use crate::speed::Speed;
use estimate::Estimate;
use homing_units::WorkerId;
use plans::Priced;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HomingConfig {
    /// A move must be cheaper than staying by so many seconds...
    pub margin_s: f64,
    /// ...and by such a share of what staying costs.
    pub margin: f64,
    /// Coming turns of a session that count, at most, however many it is expected to have: it may move again later.
    pub future_turns: f64,
    /// Of these, so many count for the company that they will have: it changes faster than what a pool is wanted for.
    pub crowd_turns: f64,
    /// Plans whose costs differ by less than this share cost the same as far as anybody can tell.
    pub alike: f64,
    /// A turn whose history is nowhere waits so many seconds at most for a pool with room for it.
    pub pace_s: f64,
    /// A pool has room as long as so many times its size is wanted.
    pub fill: f64,
    /// Nobody is held back from a worker whose live sessions keep it busy for less than this share of its time, would it prefill all of
    /// their histories anew each time.
    pub afford: f64,
    /// What a recent failure of a link costs, in seconds; where it costs nothing, the link is used again at once.
    pub failure_s: f64,
    /// Decode-only workers leave a turn whose history they hold, and of which they lack more tokens than this, to prefill workers, where
    /// any can take it.
    pub append_tokens: u32,
    /// ...and more than a step takes beside what decodes there, if it is to last so many seconds at most: those who decode wait so long
    /// for their next token. Where workers may do anything, whoever has fewer who wait may prefill it for another. 0 is no bound.
    pub itl_target_s: f64,
    /// They do it themselves all the same if prefill workers would take so many times as long.
    pub overflow: f64,
    /// What it costs to fetch a history beside moving it, in seconds: two more requests.
    pub fetch_s: f64,
    /// Decode-only workers leave a prompt whose history they do not hold, and of which they lack more tokens than this, to prefill
    /// workers, where any can take it.
    pub local_tokens: u32,
    /// Whether a session's KV is moved from one decode worker to another.
    pub moves: bool,
    /// The figures that plans are priced with, of each worker alike; `None` for what is learnt of each.
    pub speed: Option<Speed>,
    /// In which order turns that wait are looked at.
    pub order: Order,
    /// What is carried while no client waits for it.
    pub errands: ErrandKinds,
    /// The terms that count.
    pub terms: Terms,
}

impl Default for HomingConfig {
    fn default() -> Self {
        Self {
            margin_s: 0.05,
            margin: 0.2,
            future_turns: 10.0,
            crowd_turns: 1.0,
            // The median error of a first token's forecast is 2 to 7%.
            alike: 0.05,
            // Half of the time that a turn may wait at most: the other half is for the room that it wants then. At 200 a prompt of 310K
            // tokens found none in time, in one of five runs of recorded agents.
            pace_s: 150.0,
            fill: 0.9,
            // Over one, because sessions that wait come back later. By `gen:swe52` with pools of 40K to 92K tokens and gaps by 1, 3 and
            // 10: at 1 some wait for what they could have had, at 2 some pools thrash.
            afford: 1.5,
            failure_s: 2.0,
            // Of coding-agent turns nine in ten append less.
            append_tokens: 4_096,
            local_tokens: 512,
            itl_target_s: f64::INFINITY,
            overflow: 3.0,
            fetch_s: 0.05,
            moves: true,
            speed: None,
            order: Order::Service,
            errands: ErrandKinds {
                gaps: false,
                base: false,
            },
            terms: Terms::default(),
        }
    }
}

impl HomingConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let default = Self::default();
        Ok(Self {
            margin_s: parameters.number("margin_s", default.margin_s)?,
            margin: parameters.number("margin", default.margin)?,
            future_turns: parameters.number("future_turns", default.future_turns)?,
            crowd_turns: parameters.number("crowd_turns", default.crowd_turns)?,
            alike: parameters.number("alike", default.alike)?,
            pace_s: parameters.number("pace_s", default.pace_s)?,
            fill: parameters.positive("fill", default.fill)?,
            afford: parameters.number("afford", default.afford)?,
            failure_s: parameters.number("failure_s", default.failure_s)?,
            append_tokens: parameters.whole("append_tokens", default.append_tokens)?,
            itl_target_s: match parameters.number("itl_target_ms", 0.0)? {
                0.0 => default.itl_target_s,
                milliseconds => milliseconds / 1e3,
            },
            overflow: parameters.number("overflow", default.overflow)?,
            fetch_s: parameters.number("fetch_s", default.fetch_s)?,
            local_tokens: parameters.whole("local_tokens", default.local_tokens)?,
            moves: parameters.choice("moves", "`on` or `off`", &["on", "off"])? == "on",
            speed: {
                let expected = "`learnt`, `h200`, `h100`, `h20` or `b200`";
                let words = ["learnt", "h200", "h100", "h20", "b200"];
                Speed::of(parameters.choice("speed", expected, &words)?)
            },
            order: match parameters.choice(
                "order",
                "`service`, `work` or `arrival`",
                &["service", "work", "arrival"],
            )? {
                "arrival" => Order::Arrival,
                "work" => Order::Work,
                _ => Order::Service,
            },
            errands: {
                let mut is_on = |name, words: [&'static str; 2]| {
                    Ok::<_, PolicyError>(parameters.choice(name, "`on` or `off`", &words)? == "on")
                };
                let all = is_on("errands", ["off", "on"])?;
                ErrandKinds {
                    gaps: is_on("gaps", ["on", "off"])? && all,
                    base: is_on("base", ["on", "off"])? && all,
                }
            },
            terms: Terms::parse(parameters)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct Homing {
    config: HomingConfig,
    /// The share of live sessions that have a turn in flight: a running mean.
    busy_share: f64,
}

/// The weight of the newest look at the fleet in the running mean is one over this.
const BUSY_MEMORY: f64 = 64.0;

/// The share of live sessions that have a turn in flight before any was seen: 9% of the time that coding agents hold their
/// context is busy, and a loaded fleet is slower than the ones that this was measured on.
const FIRST_BUSY_SHARE: f64 = 0.2;

impl Policy for Homing {
    fn habits(&self) -> Habits {
        Habits {
            order: self.config.order,
            errands: self.config.errands,
            ..Habits::default()
        }
    }

    fn better_home(&self, board: &Board, next: &TurnView) -> Option<WorkerId> {
        let estimate = Estimate::new(&self.config, board, next, self.busy_share).on_average();
        let home = home(board, next).filter(|home| next.home == Some(home.id))?;
        errands::better_home(&estimate, home.id)
    }

    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        self.look(board);
        let estimate = Estimate::new(&self.config, board, turn, self.busy_share);
        let mut plans = plans::all(&estimate);
        let home = home(board, turn).map(|home| home.id);
        if home.is_none() {
            let crowded = pace::hold_back(&estimate, &mut plans);
            spread(&mut plans, board, self.config.alike);
            return least(
                plans,
                if crowded {
                    "waits for a pool with room"
                } else {
                    "no home: least cost"
                },
            );
        }
        let mut stays: Vec<Priced> = Vec::new();
        plans.retain(|plan| {
            let stays_home = Some(plan.considered.plan.decode) == home;
            if stays_home {
                stays.push(*plan);
            }
            !stays_home
        });
        let mut elsewhere = plans;
        stays.sort_by(|left, right| left.considered.score.total_cmp(&right.considered.score));
        let mut stays = stays.into_iter();
        let Some(stay) = stays.next() else {
            plans::rank(&mut elsewhere);
            return least(elsewhere, "its home cannot serve it: least cost");
        };
        elsewhere.extend(stays);
        plans::rank(&mut elsewhere);
        let away = elsewhere
            .first()
            .filter(|plan| plan.considered.denied.is_none())
            .copied();
        let pays = |away: &Priced| match stay.considered.denied {
            // Waiting has cost as much as leaving would have: of this turn, since the coming ones may go back.
            Some(_) => turn.waited.as_secs_f64() >= away.cost.now_s() - stay.cost.now_s(),
            None => {
                let gain_s = stay.considered.score - away.considered.score;
                gain_s > self.config.margin_s + self.config.margin * stay.considered.score
            }
        };
        let looked_at = elsewhere.iter().take(plans::RANKED);
        let mut others: Vec<Considered> = looked_at.map(|plan| plan.considered).collect();
        match away.filter(pays) {
            Some(away) => {
                others.remove(0);
                others.insert(0, stay.considered);
                let stays = away.considered.plan.decode == stay.considered.plan.decode;
                let what = if stays { "waits no longer for" } else { "leaves" };
                let reason = format!("{what} home ({}): {}", stay.cost, away.cost);
                Choice::only(away.considered, others, reason).expecting(away.cost.first_s)
            }
            None => {
                Choice::only(stay.considered, others, format!("at home: {}", stay.cost)).expecting(stay.cost.first_s)
            }
        }
    }
}

impl Homing {
    /// A policy with these parameters.
    #[must_use]
    pub const fn new(config: HomingConfig) -> Self {
        Self {
            config,
            busy_share: FIRST_BUSY_SHARE,
        }
    }

    /// Learns how busy live sessions are.
    fn look(&mut self, board: &Board) {
        let (requests, sessions) = board
            .workers
            .iter()
            .fold((0_u32, 0_u32), |(requests, sessions), worker| {
                (requests + worker.account.decodes, sessions + worker.live_sessions)
            });
        if sessions > 0 {
            let share = (f64::from(requests) / f64::from(sessions)).min(1.0);
            self.busy_share += (share - self.busy_share) / BUSY_MEMORY;
        }
    }
}

/// The worker that holds this session's history, if one does: its own blocks, and at least half of the prompt or, of a turn that
/// is longer than all before it, half of what was before it. Where it was carried in the gap comes before where it was left.
fn home<'b>(board: &'b Board, turn: &TurnView) -> Option<&'b WorkerView> {
    let holds = |worker: &&WorkerView| {
        let heavy = turn.history_tokens > 0 && turn.history_tokens < turn.prompt_tokens / 2;
        let history = if heavy { turn.history_tokens } else { turn.prompt_tokens };
        !turn.new_family && worker.exclusive_tokens > 0 && u64::from(worker.held_tokens()) * 2 >= u64::from(history)
    };
    board.decoders().filter(holds).max_by_key(|worker| {
        (
            turn.carried && turn.home == Some(worker.id),
            worker.exclusive_tokens,
            turn.home == Some(worker.id),
            std::cmp::Reverse(worker.id),
        )
    })
}

/// Puts plans in order, and before the least of them the one that ends where the fewest sessions live, of those that cost the same as far
/// as anybody can tell. Costs have the sessions that are live; here the idle ones count, too.
fn spread(plans: &mut Vec<Priced>, board: &Board, alike: f64) {
    plans::rank(plans);
    let Some(best) = plans.first().filter(|best| best.considered.denied.is_none()) else {
        return;
    };
    let bound = best.considered.score * (1.0 + alike);
    let sessions = |plan: &Priced| {
        let worker = board.worker(plan.considered.plan.decode);
        worker.map_or((0, 0), |worker| (worker.homed_sessions, worker.live_sessions))
    };
    let is_alike = |plan: &Priced| plan.considered.denied.is_none() && plan.considered.score <= bound;
    let alike = plans.iter().enumerate().filter(|(_, plan)| is_alike(plan));
    let fewest = alike.min_by(|(_, left), (_, right)| {
        let fewer = sessions(left).cmp(&sessions(right));
        fewer.then(left.considered.score.total_cmp(&right.considered.score))
    });
    if let Some((index, _)) = fewest {
        let chosen = plans.remove(index);
        plans.insert(0, chosen);
    }
}

/// The first of plans that were put in order, if it is not denied; else the turn waits for any.
fn least(plans: Vec<Priced>, reason: &str) -> Choice {
    let best = plans.first().filter(|best| best.considered.denied.is_none()).copied();
    let reason = best.map_or_else(|| reason.to_owned(), |best| format!("{reason}: {}", best.cost));
    let choice = Choice::best_of(plans.into_iter().map(|plan| plan.considered).collect(), reason);
    match best {
        Some(best) => choice.expecting(best.cost.first_s),
        None => choice,
    }
}

#[cfg(test)]
mod tests;
