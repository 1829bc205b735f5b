//! Where the KV of a plan with two legs comes from: the prefill worker that the policy chose computes the prompt, unless a
//! decode worker still holds the session's history and could hand it over (`migrate`).
//!
//! Moving KV instead of computing it anew is no matter of taste: whatever policy sends a session to another decode worker
//! is better served by the worker that has it. It is off by default, because the systems that policies stand for do not
//! all do it, and because on an engine without a release the old copy stays the most recently used one. The source
//! computes what it lacks itself, beside its decoding, so that it is held to the bound on appended tokens.

use super::Router;
use crate::action::Path;
use crate::admission::{Account, Denied};
use crate::fleet::Worker;
use crate::handoff::Request;
use crate::policies::{Board, Choice, Considered, Plan, TurnView, WorkerView};
use homing_kv::Prompt;
use homing_units::WorkerId;

/// The source computes at most this part of what the prefill worker would.
const GAIN: u32 = 2;

impl Router {
    /// The plan with the worker as its source that holds most of the session's history, where there is one.
    pub(super) fn sourced(&self, mut choice: Choice, board: &Board, turn: &TurnView) -> Choice {
        let Some(plan) = choice.plan.filter(|_| self.config.migrate && turn.may_transfer) else {
            return choice;
        };
        let Some(source) = Self::source(plan, board, turn) else {
            return choice;
        };
        let moved = Plan {
            path: Path::Migrate,
            prefill: Some(source.id),
            decode: plan.decode,
            fetch: None,
        };
        let chosen = choice.considered.iter().find(|considered| considered.plan == plan);
        let moved_at = Considered {
            plan: moved,
            resident_tokens: chosen.map_or(0, |chosen| chosen.resident_tokens),
            score: chosen.map_or(0.0, |chosen| chosen.score),
            denied: None,
        };
        choice.plan = Some(moved);
        choice.expected_ttft = None;
        choice.considered.insert(0, moved_at);
        choice.reason = format!("{}; {} holds its KV and hands it over", choice.reason, source.id);
        choice
    }

    fn source<'b>(plan: Plan, board: &'b Board, turn: &TurnView) -> Option<&'b WorkerView> {
        let prefill = board.worker(plan.prefill?)?;
        let decode = board.worker(plan.decode)?;
        let gains = |worker: &&WorkerView| {
            worker.id != prefill.id
                && worker.id != decode.id
                && worker.exclusive_tokens > 0
                && worker.held_tokens() > decode.held_tokens()
                && worker.lacks(turn).saturating_mul(GAIN) <= prefill.lacks(turn)
                && !board.link(worker.id, decode.id).is_doubtful()
        };
        let hands_over = |worker: &&WorkerView| worker.denies_export.is_none();
        let sources = board.workers.iter().filter(gains).filter(hands_over);
        sources.max_by_key(|worker| (worker.held_tokens(), std::cmp::Reverse(worker.id)))
    }

    /// Why a worker cannot hand over what it holds of a turn's prompt, whatever its role. `lacks` is what it would prefill.
    pub(super) fn denies_export(
        &self,
        worker: &Worker,
        account: &Account,
        request: &Request,
        lacks: u32,
    ) -> Option<Denied> {
        let limits = &self.config.limits;
        self.denies_all(worker, account, request)
            .or_else(|| (!worker.info.transfers || !worker.info.abilities.hands_over).then_some(Denied::Unable))
            .or_else(|| account.denies_append(lacks, limits))
            .or_else(|| account.denies_prefill(lacks, limits))
            .or_else(|| {
                let tokens = self.export_tokens(Some(worker.info.id), &request.prompt);
                account.denies_pool(tokens, worker.info.kv_tokens)
            })
    }

    /// Pool tokens that a prompt takes at a worker that prefills it or hands it over, until it is fetched; nothing where the worker
    /// does not decode: there the tokens queued for prefill are bounded instead.
    pub(super) fn export_tokens(&self, worker: Option<WorkerId>, prompt: &Prompt) -> u64 {
        let decodes = |id: &WorkerId| self.fleet.get(*id).is_some_and(|worker| worker.info.role.decodes());
        worker.filter(decodes).map_or(0, |id| {
            self.ledger.reserve_tokens(id, prompt, 0, self.config.block_size)
        })
    }
}
