# Quire from Ruby: ruby -I GENERATED example.rb ADDRESS
#
# Needs the gems grpc and googleapis-common-protos-types (Debian: ruby-grpc), and generated code:
#
#     grpc_tools_ruby_protoc -I protos --ruby_out=GENERATED --grpc_out=GENERATED quire/inference/v1/inference.proto

require 'json'
require 'securerandom'
require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'google/rpc/status_pb'
require 'quire/inference/v1/inference_services_pb'

include Quire::Inference::V1

SERVICE_CONFIG = File.join(__dir__, '..', '..', 'quire_client', 'service_config.json')

# A request for at most 16 tokens.
def generation(**fields)
  Generation.new(text: 'A quire is', stopping: Stopping.new(max_tokens: 16), **fields)
end

# One response with the whole text.
def generate(stub)
  request = GenerateRequest.new(generation: generation(sampling: Sampling.new(temperature: 0)))
  puts "generated: #{stub.generate(request).completions[0].text}"
end

# Chunks as they come, between the acceptance and the usage.
def stream(stub)
  messages = stub.stream_generate(StreamGenerateRequest.new(generation: generation))
  puts "streamed: #{messages.map { |message| message.chunk&.text }.join}"
end

# An error: its code, its reason, and the field at fault.
def fail_with_details(stub)
  stub.generate(GenerateRequest.new(generation: generation(sampling: Sampling.new(temperature: 9))))
rescue GRPC::BadStatus => e
  details = Google::Rpc::Status.decode(e.metadata['grpc-status-details-bin']).details
  info = details.find { |detail| detail.is(Google::Rpc::ErrorInfo) }.unpack(Google::Rpc::ErrorInfo)
  bad = details.find { |detail| detail.is(Google::Rpc::BadRequest) }.unpack(Google::Rpc::BadRequest)
  code = GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == e.code }
  puts "error: #{code} #{info.reason} #{bad.field_violations[0].field}"
end

# A stream that breaks, and its rest: a request with a name can be resumed, on any gateway.
def resume(stub)
  request_id = SecureRandom.uuid
  request = StreamGenerateRequest.new(generation: generation(request_id: request_id))
  call = stub.stream_generate(request, return_op: true)
  chunk = call.execute.lazy.map(&:chunk).find(&:itself)
  call.cancel
  position = Position.new(index: 0, next_offset: chunk.offset + chunk.token_ids.size)
  rest = stub.resume(ResumeRequest.new(request_id: request_id, positions: [position]))
  puts "resumed: #{chunk.text}|#{rest.map { |message| message.chunk&.text }.join}"
end

options = { 'grpc.service_config' => File.read(SERVICE_CONFIG) }
stub = InferenceService::Stub.new(ARGV[0], :this_channel_is_insecure, channel_args: options, timeout: 60)
generate(stub)
stream(stub)
fail_with_details(stub)
resume(stub)
