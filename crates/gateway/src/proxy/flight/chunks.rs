//! What a decode leg says, piece by piece: read for the core, said to the client.

use super::Flight;
use crate::upstream::{LegError, cause_of, status_in_stream};
use bytes::{Bytes, BytesMut};
use homing_router::action::KvUse;
use homing_router::event::{Event, FailureCause, LegId};
use http::StatusCode;

impl Flight {
    pub(super) async fn take_chunk(
        &mut self,
        leg: LegId,
        kv: KvUse,
        data: &Bytes,
        piece: &mut BytesMut,
    ) -> Result<(), LegError> {
        if self.attempt.native.is_some() {
            return self.take_native(leg, kv, data, piece).await;
        }
        let taken = self.transcript.take(data, self.attempt.continues).map_err(|fault| {
            // An import may fail after the stream's head was sent; once tokens came it cannot.
            let kv = if self.transcript.leg_has_output() {
                KvUse::Local
            } else {
                kv
            };
            let status = status_in_stream(fault.code.as_deref());
            LegError::in_stream(cause_of(status, fault.code.as_deref(), kv), status, fault.detail, data)
        })?;
        if taken.is_first_output {
            self.first_token.get_or_insert(self.shell.clock.now());
            self.tell(Event::FirstToken { leg }).await;
        }
        let Some(chunk) = taken.for_client else { return Ok(()) };
        let said = self
            .voice
            .take(&chunk)
            .map_err(|detail| LegError::new(FailureCause::Engine, detail))?;
        if self.voice.is_stream() {
            let headers = self.route_headers();
            self.client.begin_stream(|| headers);
            piece.extend_from_slice(&said);
        }
        Ok(())
    }

    /// An event of an engine that speaks the client's dialect.
    async fn take_native(&mut self, leg: LegId, kv: KvUse, data: &Bytes, piece: &mut BytesMut) -> Result<(), LegError> {
        let Some(native) = &mut self.attempt.native else {
            return Ok(());
        };
        let taken = native.take(data).map_err(|fault| {
            let cause = cause_of(StatusCode::INTERNAL_SERVER_ERROR, fault.code.as_deref(), kv);
            LegError::new(cause, fault.detail)
        })?;
        piece.extend_from_slice(&taken.for_client);
        if taken.is_first_output {
            self.first_token.get_or_insert(self.shell.clock.now());
            self.tell(Event::FirstToken { leg }).await;
        }
        if !taken.for_client.is_empty() {
            let headers = self.route_headers();
            self.client.begin_stream(|| headers);
        }
        Ok(())
    }

    /// What the present leg says of cached and generated tokens.
    pub(super) fn leg_usage(&self) -> (Option<u32>, u32) {
        match &self.attempt.native {
            Some(native) => native.usage(),
            None => self.transcript.leg_usage(),
        }
    }
}
