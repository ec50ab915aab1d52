//! The writing side of the floor.

use std::{collections::VecDeque, net::SocketAddr, os::fd::AsFd, time::Duration};

use riopipe_net::{
    AdaptiveSpin, IdleStep, Received, RecvBuf, Socket, connect, now_ns, pin_to_core, wait_readable,
    wait_writable,
};

use super::{
    FloorError, FloorOptions,
    message::{ANSWER_LEN, HEADER_LEN, Header, answers, stamp},
    writes_per_group,
};
use crate::{
    generator::{Extent, Generator},
    harness::{Phase, Worker},
    latency::Latencies,
    workload::BLOCK,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest sleep before the phase is checked.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// Longest time for the server's last answers, in ns.
const DRAIN_NS_MAX: u64 = 60_000_000_000;

/// One write in flight, with its reused memory.
struct Slot {
    header: [u8; HEADER_LEN],
    payload: Vec<u8>,
    len: usize,
    sent_at: u64,
}

struct Writer {
    socket: Socket,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots being sent, in order.
    outgoing: VecDeque<u32>,
    /// Bytes of the first of these that are already sent.
    sent: usize,
}

/// Writes until the worker is asked to stop, then waits for the last answers.
pub(super) fn write(
    number: u32,
    options: &FloorOptions,
    volume_blocks: u64,
    address: SocketAddr,
    worker: &Worker<'_>,
) -> Result<Latencies, FloorError> {
    let workload = &options.workload;
    if !options.writer_cores.is_empty() {
        pin_to_core(options.writer_cores[number as usize % options.writer_cores.len()])?;
    }
    let area = workload.area(number, volume_blocks)?;
    let mut generator = Generator::new(workload, number, area);
    let mut writer = Writer::new(options, address)?;
    let mut input = RecvBuf::new(0);
    let mut group = Vec::new();
    let mut staged: VecDeque<Extent> = VecDeque::new();
    let mut latencies = Latencies::new();
    let mut spin = AdaptiveSpin::new(options.spin);
    let mut answered = 0;
    let send_min = send_min(workload.queue_depth);
    let mut drain_until = None;
    worker.ready();
    loop {
        let phase = worker.phase();
        if phase == Phase::Stop {
            let until = *drain_until.get_or_insert_with(|| now_ns() + DRAIN_NS_MAX);
            if writer.in_flight() == 0 {
                return Ok(latencies);
            }
            if now_ns() > until {
                return Err(FloorError::Protocol("answers are missing"));
            }
        } else if writer.free.len() >= send_min {
            let now = now_ns();
            while !writer.free.is_empty() {
                if staged.is_empty() {
                    generator.next_group(&mut group);
                    staged.extend(&group);
                }
                // Just filled: a group is never empty.
                if let Some(extent) = staged.pop_front() {
                    writer.stage(extent, now);
                }
            }
        }
        let sent = writer.send()?;

        let received = match input.fill(&writer.socket)? {
            Received::Bytes(n) => n,
            Received::WouldBlock => 0,
            Received::Closed => return Err(FloorError::Protocol("the server has gone")),
        };
        if received > 0 {
            let now = now_ns();
            let whole = input.len() / ANSWER_LEN;
            let mut bytes = 0;
            for slot in answers(input.data()) {
                let slot_state = writer
                    .slots
                    .get(slot as usize)
                    .ok_or(FloorError::Protocol("an answer to nothing"))?;
                bytes += (slot_state.len - HEADER_LEN) as u64;
                if phase == Phase::Measure {
                    latencies.record(now - slot_state.sent_at);
                }
                writer.free.push(slot);
            }
            input.consume(whole * ANSWER_LEN);
            answered += whole as u64;
            let groups = answered / writes_per_group(workload);
            answered %= writes_per_group(workload);
            worker.completed(whole as u64, groups, bytes);
        }
        if sent + received > 0 {
            spin.on_work();
            continue;
        }
        match spin.on_idle(now_ns()) {
            IdleStep::Poll => spin.relax(),
            IdleStep::Sleep => writer.sleep()?,
        }
    }
}

/// The number of free places before more is sent: a quarter of the depth. Sending a write as soon
/// as there is space for one would mean a system call per write on both sides; waiting for more would
/// leave the server without work. (Measured at depths 32 and 128: a quarter is as good as any, half
/// loses a tenth at 32.)
fn send_min(queue_depth: u32) -> usize {
    (queue_depth as usize / 4).max(1)
}

impl Writer {
    fn new(options: &FloorOptions, address: SocketAddr) -> Result<Self, FloorError> {
        let payload_len = (options.workload.write_blocks_max() * BLOCK) as usize;
        let depth = options.workload.queue_depth;
        Ok(Self {
            socket: connect(&address.to_string(), CONNECT_TIMEOUT, &options.socket)?,
            slots: (0..depth)
                .map(|_| Slot {
                    header: [0; HEADER_LEN],
                    payload: vec![0xa5; payload_len],
                    len: 0,
                    sent_at: 0,
                })
                .collect(),
            free: (0..depth).rev().collect(),
            outgoing: VecDeque::with_capacity(depth as usize),
            sent: 0,
        })
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a free slot; there must be one.
    fn stage(&mut self, extent: Extent, now: u64) {
        let Some(number) = self.free.pop() else {
            debug_assert!(false, "no free slot");
            return;
        };
        let slot = &mut self.slots[number as usize];
        slot.len = HEADER_LEN + (extent.blocks * BLOCK) as usize;
        slot.sent_at = now;
        Header { len: slot.len as u32, slot: number, lba: extent.lba }.put(&mut slot.header);
        stamp(&mut slot.payload, extent.lba);
        self.outgoing.push_back(number);
    }

    /// Sends as much as possible; returns the number of bytes.
    fn send(&mut self) -> Result<usize, FloorError> {
        if self.outgoing.is_empty() {
            return Ok(0);
        }
        let mut skip = self.sent;
        let slots = &self.slots;
        let slices = self.outgoing.iter().flat_map(|&number| {
            let slot = &slots[number as usize];
            [&slot.header[..], &slot.payload[..slot.len - HEADER_LEN]]
        });
        let taken = self.socket.send(slices.map(|slice| {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            &slice[skipped..]
        }))?;
        self.sent += taken;
        while let Some(&number) = self.outgoing.front() {
            let len = self.slots[number as usize].len;
            if self.sent < len {
                break;
            }
            self.sent -= len;
            self.outgoing.pop_front();
        }
        Ok(taken)
    }

    /// Sleeps until there is something to receive, or space to send.
    fn sleep(&self) -> Result<(), FloorError> {
        let fd = self.socket.as_fd();
        let slept = if self.outgoing.is_empty() {
            wait_readable(fd, SLEEP_MAX)
        } else {
            // The server continues to read in any case, so space becomes free without our reading.
            wait_writable(fd, SLEEP_MAX)
        };
        slept.map(drop).map_err(|_| FloorError::Protocol("waiting failed"))
    }
}

#[cfg(test)]
mod tests {
    use riopipe_net::{Listener, SocketOptions, SpinPolicy};

    use super::*;
    use crate::access::Access;
    use crate::{
        harness::Window,
        workload::{Pattern, Shape, Workload},
    };

    #[test]
    fn data_sent_in_parts_arrives_complete() {
        const DEPTH: u32 = 256;
        const SIZE: u32 = 64 << 10;
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let options = FloorOptions {
            workload: Workload {
                access: Access::Write,
                shape: Shape::Uniform {
                    pattern: Pattern::Sequential,
                    size: SIZE,
                    batch: 1,
                    group: 1,
                },
                queue_depth: DEPTH,
                threads: 1,
                seed: 0,
            },
            window: Window { warm_up: Duration::ZERO, duration: Duration::ZERO },
            writer_cores: Vec::new(),
            server_cores: Vec::new(),
            spin: SpinPolicy::BLOCK,
            socket: SocketOptions::default(),
            link: None,
        };
        let mut writer = Writer::new(&options, listener.local_addr()).unwrap();
        for i in 0..DEPTH {
            let lba = u64::from(i * (SIZE / BLOCK));
            writer.stage(Extent { lba, blocks: SIZE / BLOCK }, 0);
        }
        assert!(writer.free.is_empty());
        // 16 MiB at once: far more than the kernel takes while the other side does not read.
        while writer.send().unwrap() > 0 {}
        assert!(!writer.outgoing.is_empty(), "no partial send");

        let server = listener.accept().unwrap().unwrap();
        let mut input = RecvBuf::new(0);
        let mut next = 0;
        while next < DEPTH {
            writer.send().unwrap();
            wait_readable(server.as_fd(), SLEEP_MAX).unwrap();
            input.fill(&server).unwrap();
            while let Some(header) = Header::parse(input.data()) {
                let lba = u64::from(next * (SIZE / BLOCK));
                assert_eq!(header.lba, lba, "message {next}");
                assert_eq!(header.len, SIZE + HEADER_LEN as u32);
                let Some(payload) = input.data().get(HEADER_LEN..header.len as usize) else {
                    break;
                };
                assert_eq!(crate::floor::message::stamped_lba(payload), lba);
                assert!(payload[8..].iter().all(|&b| b == 0xa5));
                input.consume(header.len as usize);
                next += 1;
            }
        }
        assert!(writer.outgoing.is_empty() && input.is_empty());
    }
}
