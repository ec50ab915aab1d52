//! The initiator's side of a connection against a target that may send anything, and the data of
//! the extension's vendor commands.

use riopipe_nvme::command::Sqe;
use riopipe_nvme::digest::soft;
use riopipe_session::initiator::queue_pair::{Data, Event, QpConfig, QueuePair};
use riopipe_session::outbox::Outbox;

const READ: u64 = 0;
const BIG_WRITE: u64 = 1;
const SMALL_WRITE: u64 = 2;
const COMMANDS: usize = 3;

/// A connected queue pair with commands in flight: a read of 16 bytes (4), a write of 9000 that
/// must be asked for (1), a write in its capsule (2); 0 was Connect. The first byte chooses
/// digests and how the rest, the bytes from the target, is cut; between two parts everything is sent.
/// Returns whether the connection survived.
pub fn queue_pair(data: &[u8]) -> bool {
    let Some((&bits, mut bytes)) = data.split_first() else { return true };
    let mut config = QpConfig::admin(
        "nqn.2014-08.org.nvmexpress:uuid:1".into(),
        [7; 16],
        "nqn.2026-01.io.example:drives".into(),
        soft,
    );
    config.sqsize = 4;
    config.data_max = 16384;
    config.maxr2t = 2;
    config.header_digest = bits & 1 != 0;
    config.data_digest = bits & 2 != 0;
    let mut qp: QueuePair<&'static [u8]> = QueuePair::new(config);
    let mut out = Outbox::new();
    qp.start(&mut out);

    let mut icresp = vec![0; 128];
    icresp[..8].copy_from_slice(&[1, 0, 128, 0, 128, 0, 0, 0]);
    icresp[11] = bits & 3;
    icresp[13] = 0x10; // MAXH2CDATA 4096
    let mut sent = 0;
    let mut send = |out: &mut Outbox<_>| {
        sent += out.len_bytes();
        out.consume(out.len_bytes());
    };
    send(&mut out);
    qp.receive(&icresp, &mut out, |_| ()).unwrap();
    send(&mut out);
    let mut connected = vec![5, 0, 24, 0, 24, 0, 0, 0];
    connected.resize(24, 0);
    if bits & 1 != 0 {
        connected[1] = 1;
        connected[4] = 28;
        let digest = soft(0, &connected);
        connected.extend(digest.to_le_bytes());
    }
    qp.receive(&connected, &mut out, |_| ()).unwrap();
    assert!(qp.is_ready());
    static BIG: [u8; 9000] = [3; 9000];
    let cids = [
        qp.submit(Sqe::read(1, 0, 1), READ, Data::Read(16), &mut out),
        qp.submit(Sqe::write(1, 0, 1), BIG_WRITE, Data::Write(&[&BIG]), &mut out),
        qp.submit(Sqe::write(1, 0, 1), SMALL_WRITE, Data::Write(&[&BIG[..8]]), &mut out),
    ];
    assert_eq!(cids.map(|cid| cid.unwrap().0), [4, 1, 2]);

    // In two parts an honest stream has its R2Ts in the first, and the answer to their data after.
    let step = if bits & 4 == 0 { bytes.len() * 3 / 4 + 1 } else { usize::from(bits >> 3) + 1 };
    let mut kept: Vec<u8> = Vec::new();
    let mut done = [0; COMMANDS];
    let mut read_to = 0;
    let mut alive = true;
    while alive && !bytes.is_empty() {
        let (chunk, rest) = bytes.split_at(step.min(bytes.len()));
        bytes = rest;
        kept.extend(chunk);
        send(&mut out);
        let result = qp.receive(&kept, &mut out, |event| match event {
            Event::Ready { .. } => panic!("a queue is created once"),
            Event::Done { context, .. } => done[context as usize] += 1,
            Event::Data { context, offset, bytes } => {
                assert_eq!((context, offset, done[READ as usize]), (READ, read_to, 0));
                read_to += bytes.len() as u32;
                assert!(read_to <= 16);
            }
        });
        match result {
            Ok(used) => {
                kept.drain(..used);
                let need = qp.need(&kept);
                assert!(need > kept.len() && need <= 128 + 16384 + 4);
            }
            Err(_) => {
                assert!(qp.is_closed());
                alive = false;
            }
        }
    }
    for user in qp.outstanding() {
        done[user as usize] += 1;
    }
    assert_eq!(done, [1; COMMANDS], "each is done, once, or outstanding");
    // Connect, three capsules, at most all of the write (in the worst case asked for dword by
    // dword), at most one termination request.
    send(&mut out);
    assert!(sent <= 128 + 1104 + 3 * 80 + 9000 + 2250 * 32 + 152);
    alive
}

/// The structures of the extension; the first byte chooses one. Decoding, encoding and decoding again
/// gives the same value. Returns whether the input was accepted.
pub fn extension(data: &[u8]) -> bool {
    use riopipe_session::wire::list::{PAGE_BYTES_MAX, Page, RECORD_BYTES, Settle, capacity};
    use riopipe_session::wire::{
        Claim, DIRECTORY_LEN, Extension, LogDirectory, SEQ_MAX, STATUS_LEN, VolumeStatus,
    };

    let Some((&kind, data)) = data.split_first() else { return false };
    if kind % 5 == 0 {
        let Some(page) = Page::decode(data) else { return false };
        assert!(page.entries.len() <= capacity(data.len()) && page.released <= SEQ_MAX);
        for entry in &page.entries {
            assert!(entry.attribute.seq_end() <= SEQ_MAX);
            assert!(riopipe_order::entry::loggable(&entry.attribute));
        }
        let len = (data.len() / RECORD_BYTES * RECORD_BYTES).min(PAGE_BYTES_MAX);
        if page.entries.len() <= capacity(len) {
            assert_eq!(Page::decode(&page.encode(len)), Some(page));
        }
        return true;
    }
    // The other structures are longer than random input gets.
    let mut padded = vec![0; STATUS_LEN.max(DIRECTORY_LEN)];
    let n = data.len().min(padded.len());
    padded[..n].copy_from_slice(&data[..n]);
    match kind % 5 {
        1 => Settle::decode(&padded).is_some_and(|settle| {
            assert!(settle.streams.iter().all(|stream| stream.k <= SEQ_MAX));
            assert_eq!(Settle::decode(&settle.encode()), Some(settle));
            true
        }),
        2 => Claim::decode(&padded).is_some_and(|claim| {
            assert_eq!(Claim::decode(&claim.encode()), Some(claim));
            true
        }),
        3 => VolumeStatus::decode(&padded).is_some_and(|status| {
            // Decoding may correct an owner's name.
            let again = VolumeStatus::decode(&status.encode()).unwrap();
            assert_eq!(VolumeStatus { owner: status.owner.clone(), ..again }, status);
            true
        }),
        _ => {
            if let Some(directory) = LogDirectory::decode(&padded) {
                assert_eq!(LogDirectory::decode(&directory.encode()), Some(directory));
            }
            Extension::find(&padded).is_some()
        }
    }
}
