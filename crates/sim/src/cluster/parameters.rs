//! The parameters of a cluster: one table of names, examples and what each sets.
//!
//! Presets (`h100x8-dp:kv=136K`) and TOML files (`[parameters]`) share it. They are applied in the order of the table and not
//! in that in which they were given, so that `rho=0.9:engine=session-slot` means the same the other way round.

use super::values::{bandwidth, bytes, count, duration, every, pool, positive, share, switch, tokens, wait};
use super::{Cluster, ClusterError};
use crate::nearest::nearest;
use crate::stack::{FOR_EVER, HandshakeClock, LoopAdmission, Order};
use homing_engine::api::{EngineKind, SlotConfig, TrimRule};

type Set = fn(&mut Cluster, &str) -> Result<(), ClusterError>;

/// Name, an example, and what it does.
const PARAMETERS: [(&str, &str, Set); 32] = [
    ("kv", "kv=136K", |cluster, text| {
        let kv_tokens = pool("kv", tokens("kv", text)?)?;
        cluster
            .workers
            .iter_mut()
            .for_each(|worker| worker.kv_tokens = kv_tokens);
        Ok(())
    }),
    ("nic", "nic=40GBps", |cluster, text| {
        cluster.step_model.nic_bytes_per_second = bandwidth("nic", text)?;
        Ok(())
    }),
    ("chunk", "chunk=8192", |cluster, text| {
        cluster.max_batch_tokens = positive("chunk", tokens("chunk", text)?)?;
        Ok(())
    }),
    ("host", "host=64GiB", |cluster, text| {
        cluster.host_bytes = bytes("host", text)?;
        Ok(())
    }),
    ("pcie", "pcie=50GBps", |cluster, text| {
        cluster.pcie_bytes_per_second = bandwidth("pcie", text)?;
        Ok(())
    }),
    ("staging", "staging=on", |cluster, text| {
        cluster.staging = switch("staging", text)?;
        Ok(())
    }),
    ("eviction", "eviction=expected", |cluster, text| {
        cluster.expects_returns = match text {
            "expected" => true,
            "lru" => false,
            _ => return Err(needs("eviction", text, "`expected` or `lru`")),
        };
        Ok(())
    }),
    ("front_end", "front_end=25ms", |cluster, text| {
        cluster.step_model.front_end_ms = duration("front_end", text)?.as_secs_f64() * 1e3;
        Ok(())
    }),
    ("front_end_token", "front_end_token=1us", |cluster, text| {
        cluster.front_end_per_token = duration("front_end_token", text)?;
        Ok(())
    }),
    ("engine", "engine=session-slot", |cluster, text| {
        cluster.stack.engine = engine(text)?;
        Ok(())
    }),
    ("rho", "rho=0.95", |cluster, text| {
        slots(cluster, "rho", text)?.capacity_factor = share("rho", text)?;
        Ok(())
    }),
    ("soft_cap", "soft_cap=8", |cluster, text| {
        let cap = count("soft_cap", text)?;
        slots(cluster, "soft_cap", text)?.soft_cap = (cap > 0).then_some(cap);
        Ok(())
    }),
    ("trim", "trim=no-room", |cluster, text| {
        slots(cluster, "trim", text)?.trim = match text {
            "exhausted" => TrimRule::Exhausted,
            "no-room" => TrimRule::NoRoom,
            _ => return Err(needs("trim", text, "`no-room` or `exhausted`")),
        };
        Ok(())
    }),
    ("correction_crash", "correction_crash=on", |cluster, text| {
        let slots = slots(cluster, "correction_crash", text)?;
        (slots.correction_crash, slots.correction_refused) = match text {
            "off" => (false, false),
            "on" => (true, false),
            "refused" => (false, true),
            _ => return Err(needs("correction_crash", text, "`on`, `refused` or `off`")),
        };
        Ok(())
    }),
    ("order", "order=decode-first", |cluster, text| {
        let slots = matches!(cluster.stack.engine, EngineKind::SessionSlot(_));
        cluster.stack.order = match text {
            "prefill-first" => Order::PrefillFirst,
            "decode-first" if slots => Order::DecodeFirst,
            "decode-first" => return Err(needs("order", text, "it together with `engine=session-slot`")),
            _ => return Err(needs("order", text, "`prefill-first` or `decode-first`")),
        };
        Ok(())
    }),
    ("transfer_timeout", "transfer_timeout=32s", |cluster, text| {
        cluster.stack.transfer_timeout = match text {
            "off" => None,
            _ => Some(wait("transfer_timeout", text)?),
        };
        Ok(())
    }),
    ("dead_peers", "dead_peers=on", |cluster, text| {
        let lasts = match text {
            "off" => None,
            "on" => Some(FOR_EVER),
            _ => Some(wait("dead_peers", text)?),
        };
        if lasts.is_some() && cluster.stack.transfer_timeout.is_none() {
            return Err(needs("dead_peers", text, "it together with `transfer_timeout=32s`"));
        }
        cluster.stack.dead_peers = lasts;
        Ok(())
    }),
    ("clock", "clock=room", |cluster, text| {
        cluster.stack.clock = match text {
            "sent" => HandshakeClock::Sent,
            "room" => HandshakeClock::Room,
            _ => return Err(needs("clock", text, "`sent` or `room`")),
        };
        Ok(())
    }),
    ("lease", "lease=480s", |cluster, text| {
        cluster.stack.lease = Some(wait("lease", text)?);
        Ok(())
    }),
    ("renew", "renew=off", |cluster, text| {
        cluster.stack.renews = Some(switch("renew", text)?);
        Ok(())
    }),
    ("aborts", "aborts=300s", |cluster, text| {
        cluster.stack.defects.abort_heard_after = match text {
            "at-once" => None,
            _ => Some(wait("aborts", text)?),
        };
        Ok(())
    }),
    ("cancels", "cancels=lost", |cluster, text| {
        cluster.stack.defects.loses_cancels = match text {
            "told" => false,
            "lost" => true,
            _ => return Err(needs("cancels", text, "`told` or `lost`")),
        };
        Ok(())
    }),
    ("load_failure", "load_failure=recompute", |cluster, text| {
        cluster.stack.defects.recomputes = match text {
            "fail" => false,
            "recompute" => true,
            _ => return Err(needs("load_failure", text, "`fail` or `recompute`")),
        };
        Ok(())
    }),
    ("epochs", "epochs=off", |cluster, text| {
        cluster.stack.defects.hides_restarts = !switch("epochs", text)?;
        Ok(())
    }),
    ("removals", "removals=off", |cluster, text| {
        cluster.stack.defects.hides_removals = !switch("removals", text)?;
        Ok(())
    }),
    ("events", "events=off", |cluster, text| {
        cluster.stack.defects.hides_events = !switch("events", text)?;
        Ok(())
    }),
    ("replay", "replay=16", |cluster, text| {
        let batches = text
            .parse()
            .map_err(|_| needs("replay", text, "a number of batches of KV events"))?;
        cluster.stack.kept_batches = Some(batches);
        Ok(())
    }),
    ("sketch", "sketch=told", |cluster, text| {
        cluster.stack.tells_sketches = match text {
            "untold" => false,
            "told" => true,
            _ => return Err(needs("sketch", text, "`told` or `untold`")),
        };
        Ok(())
    }),
    ("admission", "admission=loop", |cluster, text| {
        cluster.stack.admission = match text {
            "snapshot" => None,
            "loop" => Some(LoopAdmission::default()),
            _ => return Err(needs("admission", text, "`snapshot` or `loop`")),
        };
        Ok(())
    }),
    ("room", "room=told", |cluster, text| {
        cluster.stack.tells_room = match text {
            "untold" => false,
            "told" => true,
            _ => return Err(needs("room", text, "`told` or `untold`")),
        };
        Ok(())
    }),
    ("probe", "probe=2ms", |cluster, text| {
        in_loop(cluster, "probe", text)?.probe = duration("probe", text)?;
        Ok(())
    }),
    ("poll", "poll=1Hz", |cluster, text| {
        in_loop(cluster, "poll", text)?.poll_every = every("poll", text)?;
        Ok(())
    }),
];

/// Sets what was given, each parameter once at most.
pub(super) fn apply(cluster: &mut Cluster, given: &[(&str, &str)]) -> Result<(), ClusterError> {
    for (index, (name, value)) in given.iter().enumerate() {
        if given[..index].iter().any(|(earlier, _)| earlier == name) {
            return Err(malformed(&format!("{name}={value}")));
        }
        if !PARAMETERS.iter().any(|(known, ..)| known == name) {
            return Err(ClusterError::UnknownParameter {
                name: (*name).to_owned(),
                nearest: nearest(name, PARAMETERS.iter().map(|(known, ..)| *known)).unwrap_or_default(),
                known: PARAMETERS
                    .iter()
                    .map(|(_, example, _)| format!("`{example}`"))
                    .collect::<Vec<_>>()
                    .join(", "),
            });
        }
    }
    for (name, _, set) in &PARAMETERS {
        if let Some((_, value)) = given.iter().find(|(given, _)| given == name) {
            set(cluster, value)?;
        }
    }
    Ok(())
}

/// A parameter that is not `name=value`, or comes twice.
pub(super) fn malformed(parameter: &str) -> ClusterError {
    ClusterError::Parameter {
        parameter: parameter.to_owned(),
    }
}

fn needs(name: &'static str, value: &str, expected: &'static str) -> ClusterError {
    ClusterError::Value {
        name,
        value: value.to_owned(),
        expected,
    }
}

/// The slots' rules, if there are slots.
fn slots<'c>(cluster: &'c mut Cluster, name: &'static str, text: &str) -> Result<&'c mut SlotConfig, ClusterError> {
    match &mut cluster.stack.engine {
        EngineKind::SessionSlot(config) => Ok(config),
        _ => Err(needs(name, text, "it together with `engine=session-slot`")),
    }
}

/// Admission in the loop, if it is there.
fn in_loop<'c>(
    cluster: &'c mut Cluster,
    name: &'static str,
    text: &str,
) -> Result<&'c mut LoopAdmission, ClusterError> {
    let admission = cluster.stack.admission.as_mut();
    admission.ok_or_else(|| needs(name, text, "it together with `admission=loop`"))
}

/// Who holds KV between requests.
fn engine(text: &str) -> Result<EngineKind, ClusterError> {
    const ENGINES: [&str; 3] = ["block", "session-slot", "vllm"];
    match text {
        "block" => Ok(EngineKind::Block),
        "session-slot" => Ok(EngineKind::SessionSlot(SlotConfig::default())),
        "vllm" => Ok(EngineKind::Vllm),
        _ => Err(ClusterError::UnknownEngine {
            name: text.to_owned(),
            nearest: nearest(text, ENGINES.into_iter()).unwrap_or_default(),
        }),
    }
}
