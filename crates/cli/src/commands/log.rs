//! `rio log …`

mod view;

use riopipe::crc32c;
use riopipe_media::{LogReader, OpenError, boot_id, read_log};
use riopipe_order::attribute::StreamId;
use riopipe_order::entry::PartitionId;
use riopipe_order::log_region::{self, Class, HEADER_BYTES, RegionHeader, VolumeRecord, inspect};
use riopipe_order::ordering_log::{Scan, StreamLog};
use riopipe_order::region::MemRegion;
use riopipe_target::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};

use crate::{
    args::log as args,
    failure::{Code, Failure},
    output::Output,
};
use view::{PartitionError, PartitionView, RegionView, VolumeView};

pub(super) fn run(command: args::Log, output: &Output) -> Result<(), Failure> {
    match command {
        args::Log::Dump(args) => dump(&args, output),
    }
}

fn dump(args: &args::Dump, output: &Output) -> Result<(), Failure> {
    let log = read_log(&args.region).map_err(|error| cannot_read(&args.region, &error))?;
    if log.is_served() {
        output.note("note: a target serves this log: it may change while it is read");
    }
    let boot = boot_id().map_err(|error| cannot_read(&args.region, &error))?;
    let header = part(&log, args, 0..HEADER_BYTES as u64)?;
    let len = usize::try_from(log.len()).unwrap_or(usize::MAX);
    let (header, trusted) = match inspect(&header, len, boot, crc32c) {
        Class::Ours(header) => (header, true),
        Class::StaleBoot(header) => {
            output.note(
                "note: this log is of another boot, in which its target was not stopped in good \
                 order, and would not be valid: a file: log does not survive a power cut",
            );
            (header, false)
        }
        Class::Blank => return Err(refused(args, &log, log_region::OpenError::Blank)),
        Class::NotALog => return Err(refused(args, &log, log_region::OpenError::NotALog)),
        Class::Newer { version } => {
            return Err(refused(args, &log, log_region::OpenError::Newer { version }));
        }
        Class::Damaged { what } => {
            return Err(refused(args, &log, log_region::OpenError::Damaged { what }));
        }
    };
    let volumes = chosen(args, &header)?;
    let mut view = RegionView::new(&args.region, &header, boot, log.is_served(), trusted);
    let mut unreadable = Vec::new();
    let mut slots_left = LOG_SLOTS_MAX;
    for volume in volumes {
        let mut partitions = Vec::new();
        for stream in (0..volume.streams).filter(|id| args.stream.is_none_or(|only| only == *id)) {
            let found = read_partition(&log, args, volume, StreamId(stream), &mut slots_left)?;
            if let Err(error) = &found {
                unreadable.push(error.to_string());
            }
            partitions.push(PartitionView::new(stream, found, !args.summary));
        }
        view.volumes.push(VolumeView::new(volume, partitions));
    }
    output.result(&view)?;
    match &unreadable[..] {
        [] => Ok(()),
        [first, rest @ ..] => {
            let also = match rest.len() {
                0 => String::new(),
                more => format!(" (and {more} more partitions)"),
            };
            let failure = Failure::new(Code::Differs, format!("{}: {first}{also}", args.region));
            Err(match log.is_served() {
                true => failure.hint("it is being served: read it again once it is not"),
                false => failure,
            })
        }
    }
}

/// The bytes of the log as a region in memory.
fn part(
    log: &LogReader,
    args: &args::Dump,
    range: std::ops::Range<u64>,
) -> Result<MemRegion, Failure> {
    let bytes = log.read(range).map_err(|error| cannot_read(&args.region, &error))?;
    // A region consists of whole words; an odd rest belongs to no part.
    let mut region = MemRegion::new(bytes.len() / 8 * 8);
    let len = region.bytes().len();
    region.bytes_mut().copy_from_slice(&bytes[..len]);
    Ok(region)
}

/// Reads one partition. No target keeps more slots than its limits. A partition beyond them is not
/// read, so that a file with such a header costs neither memory nor time without bound.
fn read_partition(
    log: &LogReader,
    args: &args::Dump,
    volume: &VolumeRecord,
    stream: StreamId,
    slots_left: &mut u64,
) -> Result<Result<Scan, PartitionError>, Failure> {
    let slots = volume.slots;
    let left = slots_left.checked_sub(slots.into());
    let Some(left) = left.filter(|_| slots <= STREAM_SLOTS_MAX) else {
        return Ok(Err(PartitionError::TooLarge { stream: stream.0, slots }));
    };
    *slots_left = left;
    // It is below `streams`, so it exists; the header's bounds were checked when it was decoded.
    let range = volume.partition(stream).unwrap_or_default();
    let region = part(log, args, range.start as u64..range.end as u64)?;
    let id = PartitionId { volume: volume.id, stream };
    Ok(StreamLog::open(region, id, crc32c).map(|(_, scan)| scan).map_err(PartitionError::from))
}

/// The requested volumes.
fn chosen<'a>(
    args: &args::Dump,
    header: &'a RegionHeader,
) -> Result<Vec<&'a VolumeRecord>, Failure> {
    let plain = |text: &str| text.replace('-', "").to_ascii_lowercase();
    let mut volumes: Vec<_> = header.volumes.iter().collect();
    if let Some(wanted) = &args.volume {
        let wanted_id = plain(wanted);
        volumes.retain(|volume| plain(&volume.id.to_string()).starts_with(&wanted_id));
        if volumes.is_empty() {
            let ids: Vec<_> = header.volumes.iter().map(|v| v.id.to_string()).collect();
            return Err(Failure::new(
                Code::Usage,
                format!("{}: no volume whose id begins with {wanted:?}", args.region),
            )
            .hint(match ids.is_empty() {
                true => "there are no volumes in it".to_owned(),
                false => format!("there are: {}", ids.join(", ")),
            }));
        }
    }
    if let Some(stream) = args.stream {
        volumes.retain(|volume| stream < volume.streams);
        if volumes.is_empty() {
            return Err(Failure::new(
                Code::Usage,
                format!("{}: no volume in it has a stream {stream}", args.region),
            ));
        }
    }
    Ok(volumes)
}

fn cannot_read(region: &str, error: &OpenError) -> Failure {
    match error {
        OpenError::Spec { .. } => Failure::new(Code::Usage, error.to_string()),
        _ => Failure::new(Code::Media, format!("{region}: the log can't be read")).because(error),
    }
}

fn refused(args: &args::Dump, log: &LogReader, error: log_region::OpenError) -> Failure {
    let failure = Failure::new(Code::Media, format!("{}: {error}", args.region));
    match log.is_served() {
        true => failure.hint("it is being served: read it again once it is not"),
        false => failure,
    }
}
