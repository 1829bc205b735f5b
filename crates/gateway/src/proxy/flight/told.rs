//! What is told of a request beside its answer: headers, its line in the log, metrics, and what it did to its session's
//! prefix.

use super::Flight;
use crate::error::path_name;
use crate::expectation::Expectation;
use crate::prefix::watch::Turned;
use crate::proxy::client::RouteHeaders;
use crate::turn_log::{Forecast, TurnLog};
use homing_router::action::Decision;
use homing_units::{Instant, WorkerId};

impl Flight {
    /// Compares the prompt with the session's last one, once the core has said whose it is.
    pub(super) fn watch_prefix(&mut self, decision: &Decision) {
        if decision.attempt > 0 {
            return;
        }
        let Self { shell, request, .. } = self;
        let origin = request.session.origin();
        let turn = Turned {
            origin,
            fresh: &request.fresh,
            prompt: &request.prompt,
            block_size: shell.block_size,
        };
        let found = shell.prefixes.turn(decision.session, &turn);
        if let Some(found) = found {
            shell
                .telemetry
                .prefix_break(origin.client, found.kind.as_str(), found.lost_tokens);
        }
        self.prefix_break = found;
    }

    /// Notes what is expected of the decode worker's cache, to say later why it was otherwise, and of the first token.
    pub(super) fn expect(&mut self, decision: &Decision) {
        let shell = &self.shell;
        let first = decision.expected_ttft.filter(|_| decision.attempt == 0);
        self.forecast = first.map(|expected| (shell.clock.now(), expected));
        self.expectation = Some(Expectation {
            tokens: decision.expected_cached_tokens,
            prompt_tokens: decision.prompt_tokens,
            has_events: shell.fleet.tells_its_cache(decision.decode),
            life: shell.fleet.life(decision.decode),
            losses: shell.telemetry.kv_losses(decision.decode),
        });
    }

    fn cached_difference(&self) -> Option<&'static str> {
        let (expectation, found) = self.expectation.zip(self.reported_cached_tokens)?;
        let worker = self.decision.as_ref()?.decode;
        let (life, losses) = (self.shell.fleet.life(worker), self.shell.telemetry.kv_losses(worker));
        expectation.difference(found, life, losses)
    }

    pub(super) fn route_headers(&self) -> RouteHeaders {
        let decision = self.decision.as_deref();
        RouteHeaders {
            request: self.shell.request_name(self.request.id),
            session: self.session_name(),
            path: decision.map(|decision| decision.path.as_str()),
            worker: decision.map(|decision| self.worker_name(decision.decode)),
            cached_tokens: decision.map(|decision| decision.expected_cached_tokens),
        }
    }

    fn session_name(&self) -> Option<String> {
        let of_core = || self.decision.as_ref().map(|decision| decision.session.to_string());
        self.request.session.name.clone().or_else(of_core)
    }

    fn worker_name(&self, worker: WorkerId) -> String {
        self.shell.fleet.name(worker)
    }

    pub(super) fn log(&self) -> TurnLog {
        let decision = self.decision.as_deref();
        let since = |instant: Instant| instant.saturating_since(self.request.received);
        let expected = decision.map_or(0, |decision| decision.expected_cached_tokens);
        let log = TurnLog {
            request: self.shell.request_name(self.request.id),
            api: self.request.dialect.as_str(),
            session: self.session_name().unwrap_or_default(),
            turn_index: decision.map_or(0, |decision| decision.turn_index),
            path: decision.map(|decision| decision.path),
            worker: decision.map(|decision| self.worker_name(decision.decode)),
            prefill_worker: decision
                .and_then(|decision| decision.prefill)
                .map(|worker| self.worker_name(worker)),
            cached_tokens: self.reported_cached_tokens.unwrap_or(expected),
            expected_cached_tokens: expected,
            cached_difference: self.cached_difference(),
            prompt_tokens: self.request.prompt.tokens,
            output_tokens: self.output_tokens,
            replans: decision.map_or(0, |decision| decision.attempt),
            ttft: self.first_token.map(since),
            forecast: self
                .forecast
                .zip(self.first_token)
                .map(|((planned, expected), first_token)| Forecast {
                    expected,
                    took: first_token.saturating_since(planned),
                }),
            latency: since(self.shell.clock.now()),
            client: self.request.session.agent.as_str(),
            prefix_break: self.prefix_break.map(|found| found.kind.as_str()),
            prefix_lost_tokens: self.prefix_break.map_or(0, |found| found.lost_tokens),
            error: self.ending.as_ref().and_then(|ending| ending.error.clone()),
        };
        self.shell
            .telemetry
            .turn_ended(&log, expected, self.reported_cached_tokens);
        tracing::info!(
            request = log.request,
            session = log.session,
            path = path_name(log.path),
            worker = log.worker,
            prompt_tokens = log.prompt_tokens,
            cached_tokens = log.cached_tokens,
            expected_cached_tokens = log.expected_cached_tokens,
            cached_difference = log.cached_difference,
            client = log.client,
            prefix_break = log.prefix_break,
            prefix_break_message = self.prefix_break.and_then(|found| found.message),
            prefix_lost_tokens = log.prefix_lost_tokens,
            error = log.error,
            "turn"
        );
        log
    }
}
