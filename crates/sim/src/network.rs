//! The network between workers: a transfer costs its set-up and its bytes, and queues on the sender's and the receiver's
//! NIC.
//!
//! A NIC sends and receives at once, each at full bandwidth, one transfer after the other in the order in which they were
//! ordered: with equal bandwidths that is as fast as sharing, and it is exact. Switches are not modelled. A set-up does not
//! keep a NIC busy.
//!
//! Between a worker's GPU and its host memory lies PCIe, which moves both ways at once, each way in order. What comes back
//! from host memory also waits for what was ordered out before it: it may be the same blocks.

use homing_engine::StepModel;
use homing_units::{Duration, Instant};

/// When the NICs of all workers are free again.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    setup: Duration,
    model: StepModel,
    sends: Vec<Instant>,
    receives: Vec<Instant>,
}

/// One transfer's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Booking {
    /// When both NICs are free for it.
    pub(crate) starts: Instant,
    /// When its last byte arrives.
    pub(crate) ends: Instant,
}

impl Network {
    pub(crate) fn new(model: &StepModel, workers: usize) -> Self {
        Self {
            setup: model.transfer_time(0),
            model: model.clone(),
            sends: vec![Instant::ZERO; workers],
            receives: vec![Instant::ZERO; workers],
        }
    }

    /// Books a transfer of so many bytes between the NICs of two workers (their indices), over a link on which it takes so
    /// many percent of its time.
    pub(crate) fn book(&mut self, now: Instant, (from, to): (usize, usize), bytes: u64, percent: u32) -> Booking {
        let starts = now.max(self.sends[from]).max(self.receives[to]);
        let whole = self.model.transfer_time(bytes) * percent / 100;
        let busy_until = starts + whole.saturating_sub(self.setup);
        self.sends[from] = busy_until;
        self.receives[to] = busy_until;
        Booking {
            starts,
            ends: starts + whole,
        }
    }
}

/// When the PCIe links of all workers are free again.
#[derive(Clone, Debug)]
pub(crate) struct Pcie {
    bytes_per_second: f64,
    to_gpu: Vec<Instant>,
    to_host: Vec<Instant>,
}

impl Pcie {
    pub(crate) fn new(bytes_per_second: f64, workers: usize) -> Self {
        Self {
            bytes_per_second,
            to_gpu: vec![Instant::ZERO; workers],
            to_host: vec![Instant::ZERO; workers],
        }
    }

    /// Books bytes from host memory to the GPU that are in host memory from `ready` on; says when the last one arrives.
    pub(crate) fn book_load(&mut self, ready: Instant, worker: usize, bytes: u64) -> Instant {
        let starts = ready.max(self.to_gpu[worker]).max(self.to_host[worker]);
        let ends = starts + self.takes(bytes);
        self.to_gpu[worker] = ends;
        ends
    }

    /// Books bytes from the GPU to host memory. Nobody waits for them but loads.
    pub(crate) fn book_spill(&mut self, now: Instant, worker: usize, bytes: u64) {
        let starts = now.max(self.to_host[worker]);
        self.to_host[worker] = starts + self.takes(bytes);
    }

    fn takes(&self, bytes: u64) -> Duration {
        Duration::from_nanos(libm::round(bytes as f64 / self.bytes_per_second * 1e9) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_queue_on_both_nics() {
        let model = StepModel {
            nic_bytes_per_second: 1e9,
            ..StepModel::profile("h200-qwen3-30b").expect("built in")
        };
        let mut network = Network::new(&model, 4);
        let mut check = |from: usize, to: usize, bytes: u64, starts_ms: u64, ends_ms: u64| {
            let ms = |ms: u64| Instant::ZERO + Duration::from_millis(ms);
            let booking = network.book(Instant::ZERO, (from, to), bytes, 100);
            assert_eq!(
                booking,
                Booking {
                    starts: ms(starts_ms),
                    ends: ms(ends_ms)
                },
                "{from} to {to}"
            );
        };
        check(0, 1, 100_000_000, 0, 103);
        check(2, 3, 100_000_000, 0, 103);
        check(0, 3, 50_000_000, 100, 153);
        check(2, 1, 50_000_000, 100, 153);
        check(0, 2, 10_000_000, 150, 163);
        check(1, 0, 10_000_000, 0, 13);
        check(3, 1, 0, 150, 153);
        let slow = network.book(Instant::ZERO, (1, 2), 100_000_000, 300);
        assert_eq!(slow.ends - slow.starts, Duration::from_millis(309), "a slow link");
    }

    #[test]
    fn loads_wait_for_loads_and_for_spills_before_them() {
        let at = |ms: u64| Instant::ZERO + Duration::from_millis(ms);
        let mut pcie = Pcie::new(50e9, 2);
        assert_eq!(pcie.book_load(at(0), 0, 500_000_000), at(10));
        assert_eq!(pcie.book_load(at(0), 0, 500_000_000), at(20));
        assert_eq!(pcie.book_load(at(5), 1, 500_000_000), at(15), "another worker's link");
        pcie.book_spill(at(20), 0, 2_500_000_000);
        assert_eq!(
            pcie.book_load(at(20), 0, 0),
            at(70),
            "it may be what is still on its way"
        );
    }
}
