//! The ledger: what the router itself has sent where and not seen ended.
//!
//! A request has at most one booking. What a booking charges to which worker is one pure function of its plan and its
//! stage, so booking, moving on and rolling back cannot disagree: each takes the old charges off and puts the new ones on.
//! The ledger speaks of capacity only. Whether a worker lives is the fleet's business.
//!
//! No deadlock: bounds on tokens do not hold for a worker that has nothing of that kind in flight, so each request that fits
//! a pool at all is admitted once the pool is idle.

use crate::action::Fetch;
use crate::config::Limits;
use crate::sharing::shared_beyond;
use homing_kv::Prompt;
use homing_units::{RequestId, WorkerId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What is in flight at one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Requests with a leg here, or that will have one.
    pub requests: u32,
    /// Pool tokens that their prompts and expected outputs take, what they share counted once.
    pub reserved_tokens: u64,
    /// Requests whose KV is to come from elsewhere and is not here yet.
    pub seeds: u32,
    /// Prompt tokens of those.
    pub seed_tokens: u64,
    /// Prompt tokens that decode legs prefill here themselves (`append`, `local`), until their first token.
    pub append_tokens: u64,
    /// Prompt tokens of prefill legs that were sent here, until they are answered.
    pub prefill_tokens: u64,
    /// Prompts whose KV is held here until it is fetched.
    pub exports: u32,
    /// Prompt tokens of requests whose first token is out: the context that decodes here.
    pub decode_tokens: u64,
    /// Those requests.
    pub decodes: u32,
    /// Pairs of a token that is yet to be prefilled here and a token that it attends to, in millions, rounded up: what long
    /// prompts cost beyond their tokens.
    pub pending_pairs: u64,
}

/// What a request takes, as far as its plan matters.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    pub(crate) decode: WorkerId,
    pub(crate) prefill: Option<WorkerId>,
    pub(crate) fetch: Option<Fetch>,
    pub(crate) prompt: Prompt,
    /// Pool tokens at the decode worker.
    pub(crate) reserve_tokens: u64,
    /// Prompt tokens that the decode worker lacks.
    pub(crate) tail_tokens: u32,
    /// Prompt tokens that the prefill worker lacks, whatever it fetches aside.
    pub(crate) prefill_tokens: u32,
    /// Pool tokens at the prefill worker, where that one decodes too: the KV lies there until it is fetched, and what comes back from
    /// host memory for that needs room as well.
    pub(crate) export_tokens: u64,
}

/// How far a booked request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its history is on its way to the prefill worker.
    Fetch,
    /// Its prompt is being prefilled, wherever that is.
    Prefill,
    /// Its KV is on its way to the decode worker.
    Pull,
    /// Its tokens are being generated.
    Decode,
}

/// The one booking of a request.
#[derive(Clone, Debug)]
struct Booking {
    demand: Demand,
    stage: Stage,
}

/// All bookings.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    bookings: BTreeMap<RequestId, Booking>,
    accounts: BTreeMap<WorkerId, Account>,
    /// Who is booked at a decode worker, to see what a prompt shares with what runs there.
    decoding: BTreeMap<WorkerId, BTreeSet<RequestId>>,
    /// Transfers that are on their way, or will be, from one worker to another.
    transfers: BTreeMap<(WorkerId, WorkerId), u32>,
}

/// Why a worker does not take a leg now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Denied {
    /// It is dead.
    Dead,
    /// It is suspect: it may be back soon, or be dead.
    Suspect,
    /// It failed this request before.
    Avoided,
    /// Prompt and output do not fit its context or its pool, ever.
    TooLong,
    /// Its role or its engine does not allow it.
    Unable,
    /// It said that it is busy.
    Busy,
    /// It was suspect or dead, and is tried with a few legs first.
    OnTrial,
    /// As many requests as it may have are in flight.
    Requests,
    /// Its pool is wanted by sessions that are expected back.
    Crowded,
    /// Its pool is full of what is in flight.
    PoolFull,
    /// It says itself that its pool has no room.
    SaysFull,
    /// The next room there is kept for one that has waited long.
    Kept,
    /// As many seeds as it may have are pending.
    Seeds,
    /// As many tokens as it may prefill beside its decoding are in flight.
    AppendTokens,
    /// As many tokens as it may have queued for prefill are.
    PrefillTokens,
}

impl Denied {
    /// In a few words, for `Candidate::forbidden`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Dead => "taken for dead",
            Self::Suspect => "not reached, its probes will tell",
            Self::Avoided => "failed this request before",
            Self::TooLong => "prompt and output do not fit",
            Self::Unable => "its role or engine does not allow it",
            Self::Busy => "said it is busy",
            Self::OnTrial => "on trial after it was away",
            Self::Requests => "too many requests in flight",
            Self::Crowded => "pool wanted by sessions that are expected back",
            Self::PoolFull => "pool full of requests in flight",
            Self::SaysFull => "says that its pool is full",
            Self::Kept => "kept for one that has waited long",
            Self::Seeds => "too many seeds pending",
            Self::AppendTokens => "too many append tokens in flight",
            Self::PrefillTokens => "prefill queue full",
        }
    }

    /// Whether it denies because of what is in flight, so that the longest patience is rewarded.
    #[must_use]
    pub const fn is_room(self) -> bool {
        matches!(
            self,
            Self::Requests
                | Self::PoolFull
                | Self::SaysFull
                | Self::Kept
                | Self::Seeds
                | Self::AppendTokens
                | Self::PrefillTokens
        )
    }

    /// Whether no patience helps.
    #[must_use]
    pub const fn is_lasting(self) -> bool {
        matches!(self, Self::Dead | Self::Avoided | Self::TooLong | Self::Unable)
    }
}

impl Ledger {
    /// Books a request: the one place where capacity is taken.
    pub(crate) fn book(&mut self, request: RequestId, demand: Demand) {
        self.decoding.entry(demand.decode).or_default().insert(request);
        let stage = if demand.fetch.is_some() {
            Stage::Fetch
        } else {
            Stage::Prefill
        };
        let booking = Booking { demand, stage };
        self.put_on(&booking);
        let before = self.bookings.insert(request, booking);
        assert!(before.is_none(), "{request} is booked twice");
    }

    /// A booked request has come further; what the stage before took is freed.
    pub(crate) fn advance(&mut self, request: RequestId, stage: Stage) {
        let mut booking = self
            .bookings
            .remove(&request)
            .expect("only a booked request comes further");
        self.take_off(&booking);
        booking.stage = stage;
        self.put_on(&booking);
        self.bookings.insert(request, booking);
    }

    /// Frees all that a request has booked: the one place where capacity is given back. Whether it had any.
    pub(crate) fn release(&mut self, request: RequestId) -> bool {
        let Some(booking) = self.bookings.remove(&request) else {
            return false;
        };
        self.take_off(&booking);
        let decode = booking.demand.decode;
        if let Some(decoding) = self.decoding.get_mut(&decode) {
            decoding.remove(&request);
            if decoding.is_empty() {
                self.decoding.remove(&decode);
            }
        }
        true
    }

    pub(crate) fn account(&self, worker: WorkerId) -> Account {
        self.accounts.get(&worker).copied().unwrap_or_default()
    }

    /// Transfers that are on their way, or will be, by link.
    pub(crate) fn links(&self) -> impl Iterator<Item = ((WorkerId, WorkerId), u32)> + '_ {
        self.transfers.iter().map(|(link, transfers)| (*link, *transfers))
    }

    /// Whether nothing is booked anywhere.
    pub(crate) fn is_empty(&self) -> bool {
        self.bookings.is_empty() && self.accounts.is_empty() && self.transfers.is_empty()
    }

    /// Pool tokens that a prompt would take at a worker, beyond what it shares with a request that runs there.
    pub(crate) fn reserve_tokens(&self, worker: WorkerId, prompt: &Prompt, output_tokens: u32, block_size: u32) -> u64 {
        let whole = u64::from(prompt.tokens) + u64::from(output_tokens);
        let running = self.decoding.get(&worker).into_iter().flatten();
        let shared = running.fold(0, |most, other| {
            shared_beyond(&self.bookings[other].demand.prompt.blocks, &prompt.blocks, most)
        });
        whole - (shared as u64 * u64::from(block_size)).min(u64::from(prompt.tokens))
    }

    fn put_on(&mut self, booking: &Booking) {
        for (worker, charge) in booking.charges() {
            self.accounts.entry(worker).or_default().add(charge);
        }
        for link in booking.links() {
            *self.transfers.entry(link).or_default() += 1;
        }
    }

    fn take_off(&mut self, booking: &Booking) {
        for (worker, charge) in booking.charges() {
            let account = self
                .accounts
                .get_mut(&worker)
                .expect("a booking's charges are on its accounts");
            account.subtract(charge);
            if *account == Account::default() {
                self.accounts.remove(&worker);
            }
        }
        for link in booking.links() {
            let transfers = self.transfers.get_mut(&link).expect("a booking's transfer is counted");
            *transfers -= 1;
            if *transfers == 0 {
                self.transfers.remove(&link);
            }
        }
    }

    /// The requests that are booked.
    pub(crate) fn requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.bookings.keys().copied()
    }

    pub(crate) fn check_invariants(&self) {
        let mut again = Self::default();
        for (request, booking) in &self.bookings {
            again.put_on(booking);
            again
                .decoding
                .entry(booking.demand.decode)
                .or_default()
                .insert(*request);
        }
        assert_eq!(self.accounts, again.accounts, "accounts are the sum of the bookings");
        assert_eq!(self.transfers, again.transfers, "transfers are those of the bookings");
        assert_eq!(self.decoding, again.decoding, "who decodes where is as booked");
    }
}

impl Booking {
    /// What it takes now, and where.
    fn charges(&self) -> impl Iterator<Item = (WorkerId, Account)> {
        let Demand {
            decode,
            prefill,
            fetch,
            prompt,
            reserve_tokens,
            tail_tokens,
            prefill_tokens,
            export_tokens,
        } = &self.demand;
        let mut at_decode = Account {
            requests: 1,
            reserved_tokens: *reserve_tokens,
            ..Account::default()
        };
        let (mut at_prefill, mut at_lender) = (None, None);
        match (prefill, self.stage) {
            (None, Stage::Fetch | Stage::Prefill) => {
                at_decode.append_tokens = u64::from(*tail_tokens);
                at_decode.pending_pairs = million_pairs(*tail_tokens, prompt.tokens);
            }
            (None, Stage::Pull | Stage::Decode) | (Some(_), Stage::Decode) => {
                at_decode.decode_tokens = u64::from(prompt.tokens);
                at_decode.decodes = 1;
            }
            (Some(prefill), Stage::Fetch | Stage::Prefill | Stage::Pull) => {
                at_decode.seeds = 1;
                at_decode.seed_tokens = u64::from(prompt.tokens);
                let pulls = self.stage == Stage::Pull;
                let queued = if pulls { 0 } else { u64::from(*prefill_tokens) };
                let charge = Account {
                    requests: 1,
                    reserved_tokens: *export_tokens,
                    prefill_tokens: queued,
                    pending_pairs: if pulls {
                        0
                    } else {
                        million_pairs(*prefill_tokens, prompt.tokens)
                    },
                    exports: u32::from(pulls),
                    ..Account::default()
                };
                at_prefill = Some((*prefill, charge));
            }
        }
        if let Some(fetch) = fetch.filter(|_| self.stage == Stage::Fetch) {
            let charge = Account {
                // Most often it decodes the turn as well, and has one request of it.
                requests: u32::from(fetch.from != *decode),
                exports: 1,
                ..Account::default()
            };
            at_lender = Some((fetch.from, charge));
        }
        std::iter::once((*decode, at_decode)).chain(at_prefill).chain(at_lender)
    }

    /// The links that its KV takes or will take.
    fn links(&self) -> impl Iterator<Item = (WorkerId, WorkerId)> {
        let Demand {
            decode, prefill, fetch, ..
        } = self.demand;
        let back = prefill.filter(|_| self.stage != Stage::Decode);
        let fetch = fetch.filter(|_| self.stage == Stage::Fetch).map(|fetch| fetch.from);
        let there = fetch.zip(prefill);
        there.into_iter().chain(back.map(|prefill| (prefill, decode)))
    }
}

/// Pairs of the prefill of so many tokens at a prompt's end, in millions, rounded up.
fn million_pairs(tail_tokens: u32, prompt_tokens: u32) -> u64 {
    libm::ceil(crate::speed::pairs(tail_tokens, prompt_tokens) / 1e6) as u64
}

impl Account {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.reserved_tokens += other.reserved_tokens;
        self.seeds += other.seeds;
        self.seed_tokens += other.seed_tokens;
        self.append_tokens += other.append_tokens;
        self.prefill_tokens += other.prefill_tokens;
        self.exports += other.exports;
        self.decode_tokens += other.decode_tokens;
        self.decodes += other.decodes;
        self.pending_pairs += other.pending_pairs;
    }

    fn subtract(&mut self, other: Self) {
        self.requests -= other.requests;
        self.reserved_tokens -= other.reserved_tokens;
        self.seeds -= other.seeds;
        self.seed_tokens -= other.seed_tokens;
        self.append_tokens -= other.append_tokens;
        self.prefill_tokens -= other.prefill_tokens;
        self.exports -= other.exports;
        self.decode_tokens -= other.decode_tokens;
        self.decodes -= other.decodes;
        self.pending_pairs -= other.pending_pairs;
    }

    /// Why this account leaves no room for so many pool tokens, of a pool of `kv_tokens`.
    pub(crate) fn denies_pool(&self, reserve_tokens: u64, kv_tokens: u64) -> Option<Denied> {
        let full = self.requests > 0 && self.reserved_tokens + reserve_tokens > kv_tokens;
        full.then_some(Denied::PoolFull)
    }

    /// Why this account leaves no room for a decode leg whatever its KV comes from. `kv_tokens` is the pool's size.
    pub(crate) fn denies_decode(&self, reserve_tokens: u64, kv_tokens: u64, limits: &Limits) -> Option<Denied> {
        if self.requests >= limits.requests_per_worker {
            return Some(Denied::Requests);
        }
        self.denies_pool(reserve_tokens, kv_tokens)
    }

    /// Why it leaves no room for the prefill of so many tokens beside decoding.
    pub(crate) fn denies_append(&self, tail_tokens: u32, limits: &Limits) -> Option<Denied> {
        let full =
            self.append_tokens > 0 && self.append_tokens + u64::from(tail_tokens) > limits.append_tokens_per_decode;
        full.then_some(Denied::AppendTokens)
    }

    /// Why it leaves no room for one more seed of so many tokens.
    pub(crate) fn denies_seed(&self, prompt_tokens: u32, limits: &Limits) -> Option<Denied> {
        let full = self.seeds >= limits.seeds_per_decode
            || self.seeds > 0 && self.seed_tokens + u64::from(prompt_tokens) > limits.seed_tokens_per_decode;
        full.then_some(Denied::Seeds)
    }

    /// Why it leaves no room for a prefill leg of so many tokens.
    pub(crate) fn denies_prefill(&self, prefill_tokens: u32, limits: &Limits) -> Option<Denied> {
        if self.requests >= limits.requests_per_worker {
            return Some(Denied::Requests);
        }
        let queued = self.prefill_tokens;
        let full = queued > 0 && queued + u64::from(prefill_tokens) > limits.prefill_tokens_per_prefill;
        full.then_some(Denied::PrefillTokens)
    }
}

#[cfg(test)]
mod tests;
